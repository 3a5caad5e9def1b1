"""This rank's part of distributed tensors. Plain tensors are their own part."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def get_local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def find_compute_device(tensor: Tensor) -> torch.device:
    """Return the device that computes with this rank's part, which may be in host memory."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def find_local_region(tensor: Tensor) -> tuple[slice, ...]:
    """Return the region of the whole tensor that this rank has."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, length) for length in tensor.shape)
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def wrap_like(local: Tensor, like: Tensor) -> Tensor:
    """Return `local` as this rank's part of a tensor that is distributed as `like`."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_counted_copy(tensor: Tensor) -> bool:
    """Return whether this rank's part is the first of the equal copies that the tensor's mesh describes."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh of its own parameters"
    return all(
        index == 0 for index, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )
