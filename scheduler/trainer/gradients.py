"""The norm of all gradients of a training, over every dimension of its plan, and their scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scheduler.trainer.layout import Layout, locate_rank
from scheduler.trainer.local_shards import find_compute_device, get_local_tensor, is_counted_copy
from scheduler.trainer.model_parts import ModelPart

_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class GlobalGradients:
    """The gradients of this rank's model parts.

    Of a parameter that several ranks hold, one rank counts each element: the first copy on the dimensions of the
    parameter's mesh, and the first tensor-parallel rank if the mesh does not describe that dimension.

    Attributes:
        counted: the parameters whose elements on this rank this rank counts.
    """

    def __init__(self, parts: Sequence[ModelPart], layout: Layout, *, rank: int) -> None:
        numbered = [layer for part in parts for layer in part.model.numbered_layers()]
        trained = [(number, each) for number, layer in numbered for each in layer.parameters() if each.requires_grad]
        number_in_group = layout.rank_in_group(rank)
        # A rank whose layers are all frozen takes part in the sum, which NCCL computes on GPUs only.
        self._device = find_compute_device(next(each for _, layer in numbered for each in layer.parameters()))
        self._parameters = [parameter for _, parameter in trained]
        self.counted = [
            parameter for number, parameter in trained if _is_counted(parameter, layout, number, number_in_group)
        ]

    @torch.no_grad()
    def compute_norm(self) -> Tensor:
        """Return the 2-norm of all gradients of the whole model, float64, the same on every rank. Collective."""
        norms = [torch.linalg.vector_norm(each).to(self._device) for each in _local_gradients(self.counted)]
        total = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
        total = total.to(self._device)
        dist.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        """Multiply all gradients in place."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in _local_gradients(self._parameters):
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, gradients in by_device.items():
            torch._foreach_mul_(gradients, factor.to(device, gradients[0].dtype))


def compute_clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that reduces gradients of this norm to at most `max_norm`; 1 if they are smaller."""
    return (max_norm / (norm + _EPSILON)).clamp(max=1.0)


def _is_counted(parameter: Tensor, layout: Layout, layer: int, rank: int) -> bool:
    if layout.uses_ddp:
        return rank == 0
    mesh = getattr(parameter, "device_mesh", None)
    describes_tensor_ranks = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
    return is_counted_copy(parameter) and (
        describes_tensor_ranks or locate_rank(layout.strategies[layer], rank).tp == 0
    )


def _local_gradients(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    return (get_local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None)
