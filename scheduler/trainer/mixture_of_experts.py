"""A mixture-of-experts feed-forward layer, and its expert and tensor parallelism.

A token's output is the sum of its best experts' outputs, weighted by a softmax over their logits only (Mixtral,
arXiv 2401.04088, section 2.1). Experts have no capacity limit, no token is dropped (MegaBlocks, arXiv 2211.15841),
and there is no load-balancing loss. The output of a token therefore depends on that token only, and every layout
trains the same model.

With expert parallelism each rank of a group holds equally many consecutive experts. Tokens travel to the ranks of
their experts and back by all-to-all (GShard, arXiv 2006.16668, section 3.2).

With tensor parallelism each expert is split like a dense feed-forward layer, by columns and then by rows
(Megatron-LM, arXiv 1909.08053, section 3). All tensor-parallel ranks have the same tokens and route them alike.
Their outputs are partial sums. With both, each tensor-parallel rank sends only its share of a token's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from scheduler.trainer.precision import autocast_to, round_as_computed

# Dimension in which tensor parallelism splits each parameter. Each rank has a part of the last bias, so that the sum
# over ranks contains it once.
_SHARD_DIMENSIONS = {"up": 2, "up_bias": 1, "down": 1, "down_bias": 1}


class ColumnShard:
    """A rank's equal share of the columns of a matrix, among the ranks of a one-dimensional mesh."""

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        self._mesh = mesh
        self._width = width
        self._share = width // mesh.size()
        self._begin = mesh.get_local_rank() * self._share

    def select_own(self, rows: Tensor) -> Tensor:
        return rows.narrow(1, self._begin, self._share)

    def pad(self, part: Tensor) -> Tensor:
        """Pad this rank's columns with zeros, so that the sum over ranks has all columns."""
        return functional.pad(part, (self._begin, self._width - self._begin - self._share))

    def all_gather(self, part: Tensor) -> Tensor:
        """Return all columns from each rank's own. Collective."""
        whole = DTensor.from_local(part, self._mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def reduce_scatter(self, term: Tensor) -> Tensor:
        """Return this rank's columns of the sum over all ranks. Collective."""
        total = DTensor.from_local(term, self._mesh, [Partial()], run_check=False)
        return total.redistribute(placements=[Shard(1)]).to_local()


class Experts(nn.Module):
    """Stacked feed-forward networks: dimension 0 of each parameter is the expert, of this rank's experts once sharded.

    A separate module, so that `fully_shard` can shard it over other ranks than the router.
    """

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.column_shard: ColumnShard | None = None
        self.up = nn.Parameter(0.02 * torch.randn(experts, hidden, 4 * hidden))
        self.up_bias = nn.Parameter(torch.zeros(experts, 4 * hidden))
        self.down = nn.Parameter(0.02 * torch.randn(experts, 4 * hidden, hidden))
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Run the experts.

        Args:
            rows: shape (rows, hidden), sorted by expert.
            counts: number of rows of each expert on this rank.

        Returns:
            The outputs in the same shape. If the experts are split by columns, this rank's partial sum.
        """
        up, up_bias, down, down_bias = (
            _to_local(weight) for weight in (self.up, self.up_bias, self.down, self.down_bias)
        )
        down_bias = down_bias if self.column_shard is None else self.column_shard.pad(down_bias)
        weights = (weight.unbind() for weight in (up, up_bias, down, down_bias))
        # Experts without rows run too, so that their gradients are zero instead of missing, as FSDP requires, and so
        # that recomputation runs the same operations on each rank.
        outputs = [
            torch.addmm(bias_out, functional.gelu(torch.addmm(bias_in, part, weight_in)), weight_out)
            for part, weight_in, bias_in, weight_out, bias_out in zip(
                torch.split(rows, list(counts)), *weights, strict=True
            )
        ]
        return torch.cat(outputs)


class MixtureOfExperts(nn.Module):
    """Feed-forward layer with routed experts. Inputs and outputs have shape (..., hidden).

    Among equal logits the first expert wins.

    With one expert per token the softmax has one logit, so the router's gradient is zero.

    If the experts are split over tensor-parallel ranks, the inputs are a replicated DTensor, and each rank returns
    its partial sum of the outputs as a plain tensor.

    Attributes:
        expert_group: the ranks over which the experts are sharded, set by `shard_experts`; None if this rank has all
            experts. All its ranks must run forward and backward equally often, each on any number of tokens.
        run_rows: the function of sorted rows and their counts by expert that `forward` calls.
    """

    def __init__(self, *, hidden: int, experts: int, experts_per_token: int) -> None:
        """Create the router and the experts.

        Raises:
            ValueError: `experts_per_token` is not from 1 to `experts`.
        """
        if not 1 <= experts_per_token <= experts:
            raise ValueError(f"`experts_per_token` is {experts_per_token}. It must be 1 to `experts`, {experts}.")
        super().__init__()
        self.expert_group: dist.ProcessGroup | None = None
        self.experts_per_token = experts_per_token
        self.run_rows: Callable[[Tensor, Tensor], Tensor] = self.run_experts
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        local = _to_local(inputs)
        tokens = local.reshape(-1, local.shape[-1])
        weights, chosen = self._route(tokens)
        by_expert = chosen.flatten().argsort(stable=True)
        # Copy before sorting, so that no row is selected twice and the backward pass is deterministic.
        copies = tokens.unsqueeze(1).expand(-1, self.experts_per_token, -1).reshape(-1, tokens.shape[1])
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        computed = self.run_rows(copies.index_select(0, by_expert), counts)
        outputs = computed.index_select(0, by_expert.argsort()).view(*chosen.shape, tokens.shape[1])
        return (outputs * weights.unsqueeze(-1)).sum(dim=1).view(local.shape)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices of each token's experts, both of shape (tokens, experts_per_token)."""
        weight = round_as_computed(_to_local(self.router.weight), tokens.dtype)
        # Not in half precision, in which many logits are equal and small differences change a token's experts.
        with autocast_to(None, tokens.device):
            logits = functional.linear(tokens, weight)
        # Unlike topk, a stable sort defines which of two equal logits comes first.
        logits, experts = logits.sort(dim=-1, descending=True, stable=True)
        return logits[:, : self.experts_per_token].softmax(dim=-1), experts[:, : self.experts_per_token]

    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run rows that are sorted by expert, with `counts` rows per expert, on the ranks that hold the experts."""
        if self.expert_group is None:
            outputs: Tensor = self.experts(rows, counts.tolist())
            return outputs
        columns = self.experts.column_shard
        arriving_counts = torch.empty_like(counts)
        dist.all_to_all_single(arriving_counts, counts, group=self.expert_group)
        ranks, local_experts = self.expert_group.size(), counts.numel() // self.expert_group.size()
        # One copy to the host for both, because each copy waits for the device.
        leaving, arriving = torch.stack([counts, arriving_counts]).view(2, ranks, local_experts).tolist()
        sent, received = [sum(row) for row in leaving], [sum(row) for row in arriving]
        rows = _exchange_rows(rows if columns is None else columns.select_own(rows), sent, received, self.expert_group)
        rows = rows if columns is None else columns.all_gather(rows)
        # Received rows are sorted by rank and then by expert.
        expert = torch.arange(local_experts, device=rows.device).repeat(ranks)
        expert = expert.repeat_interleave(arriving_counts, output_size=sum(received))
        by_expert = expert.argsort(stable=True)
        outputs = self.experts(rows.index_select(0, by_expert), [sum(column) for column in zip(*arriving, strict=True)])
        outputs = outputs.index_select(0, by_expert.argsort())
        outputs = _exchange_rows(
            outputs if columns is None else columns.reduce_scatter(outputs), received, sent, self.expert_group
        )
        return outputs if columns is None else columns.pad(outputs)


def shard_experts(module: MixtureOfExperts, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
    """Keep this rank's share of the experts, as DTensors. Checkpoints store whole experts.

    All ranks must hold equal weights before, because nothing is sent. Further sharding comes after this call:

        mesh = init_device_mesh(device, (dp, ep, tp), mesh_dim_names=("dp", "ep", "tp"))
        others = init_device_mesh(device, (dp * ep, tp), mesh_dim_names=("dp", "tp"))
        shard_experts(moe, mesh["ep", "tp"], others["tp"])
        fully_shard(moe.experts, mesh=mesh["dp"])
        fully_shard(block, mesh=others["dp"])               # the router and the rest, over all dp x ep ranks

    An expert gets the sum of the gradients from all ranks of `mesh`. FSDP must sum as well: its average would be
    over dp only.

    Args:
        mesh: two dimensions: ranks that hold different experts, and ranks that share each expert.
        tensor_mesh: the latter ranks in the mesh of the rest of the model. All of them hold the router.

    Raises:
        ValueError: the ranks do not divide the experts or their width.
    """
    experts, width = module.router.out_features, module.router.in_features
    ep, tp = mesh.size(0), mesh.size(1)
    if experts % ep:
        raise ValueError(f"`ep` is {ep}. It must divide the {experts} experts.")
    if width % tp:
        raise ValueError(f"`tp` is {tp}. It must divide the experts' width of {width}.")
    assert module.expert_group is None, "the experts are already sharded"
    for name, weight in list(module.experts.named_parameters()):
        part = weight.detach().chunk(ep)[mesh.get_local_rank(0)]
        part = part.chunk(tp, _SHARD_DIMENSIONS[name])[mesh.get_local_rank(1)]
        # Clone, because a view would keep the whole tensor in memory.
        _replace_parameter(
            module.experts,
            name,
            part.clone(memory_format=torch.contiguous_format),
            mesh,
            [Shard(0), Shard(_SHARD_DIMENSIONS[name])],
        )
    if ep > 1:
        module.expert_group = mesh.get_group(0)
    if tp > 1:
        module.experts.column_shard = ColumnShard(tensor_mesh, width)
        _replace_parameter(module.router, "weight", module.router.weight.detach(), tensor_mesh, [Replicate()])


def _replace_parameter(
    module: nn.Module, name: str, part: Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    is_trainable = module.get_parameter(name).requires_grad
    sharded = DTensor.from_local(part, mesh, placements, run_check=False)
    setattr(module, name, nn.Parameter(sharded, requires_grad=is_trainable))


def _to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor. The gradient of a replicated tensor is summed over its ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(
        grad_placements=[Partial() if placement.is_replicate() else placement for placement in tensor.placements]
    )


class _AllToAll(Function):
    """Differentiable all-to-all of rows among the ranks of a group. Each rank may have any number of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


# The first `sent[0]` rows go to rank 0 of the group, and so on. `received[r]` rows of the result come from rank r.
_exchange_rows: Callable[[Tensor, list[int], list[int], dist.ProcessGroup], Tensor] = _AllToAll.apply


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    outputs = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(outputs, rows.contiguous(), received, sent, group=group)
    return outputs
