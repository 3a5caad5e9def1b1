"""Checksums of the files of a checkpoint: a CRC-32 per block of 64 MiB.

All ranks take part, so that the time does not grow with the size of the model. Without a process group, this process
reads all files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from ebbtide.checkpoints.coordination import compute_on_all_ranks, is_distributed

_BLOCK_BYTES = 64 << 20
_PART_BYTES = 1 << 20
_THREADS = 4  # zlib computes a checksum without the interpreter lock

T = TypeVar("T")


def compute_checksums(root: Path, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the checksums of the blocks of each file. Collective, if there is a process group.

    Args:
        sizes: bytes of each file by its name relative to `root`, the same on all ranks.

    Raises:
        OSError: a rank cannot read a file.
    """
    blocks = [(name, offset) for name, size in sizes.items() for offset in range(0, size, _BLOCK_BYTES)]
    checksums: dict[str, list[int]] = {name: [] for name in sizes}
    for (name, _), checksum in zip(blocks, _share(blocks, partial(_compute_checksum, root)), strict=True):
        checksums[name].append(checksum)
    return checksums


def find_damaged_files(root: Path, checksums: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of files that are missing or differ. Collective, if there is a process group.

    Raises:
        OSError: a rank cannot read a file.
    """

    def is_damaged(block: tuple[str, int, int]) -> bool:
        name, offset, expected = block
        try:
            return _compute_checksum(root, (name, offset)) != expected
        except FileNotFoundError:
            return True

    blocks = [
        (name, number * _BLOCK_BYTES, checksum)
        for name, expected in checksums.items()
        for number, checksum in enumerate(expected)
    ]
    return sorted({name for (name, _, _), damaged in zip(blocks, _share(blocks, is_damaged), strict=True) if damaged})


def _share(tasks: Sequence[T], compute: Callable[[T], int]) -> Iterable[int]:
    """Return the result of each task. Every rank computes some of them."""
    rank, world_size = _find_place()
    own = compute_on_all_ranks(partial(_compute_all, compute, tasks[rank::world_size]))
    if world_size == 1:
        return own
    import torch.distributed as dist

    parts: list[list[int]] = [[]] * world_size
    dist.all_gather_object(parts, own)
    return [parts[number % world_size][number // world_size] for number in range(len(tasks))]


def _compute_all(compute: Callable[[T], int], tasks: Sequence[T]) -> list[int]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(compute, tasks))


def _compute_checksum(root: Path, block: tuple[str, int]) -> int:
    name, offset = block
    checksum, left = 0, _BLOCK_BYTES
    with (root / name).open("rb", buffering=0) as file:
        file.seek(offset)
        while left and (part := file.read(min(left, _PART_BYTES))):
            checksum, left = crc32(part, checksum), left - len(part)
    return checksum


def _find_place() -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    if not is_distributed():
        return 0, 1
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()
