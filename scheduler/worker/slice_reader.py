"""SliceReader: fills the tensors of a rank from a checkpoint, and reads no more of each stored piece than it needs."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from scheduler.domain.replan import LoadTraffic
from scheduler.worker.manifest import CheckpointError
from scheduler.worker.pieces import METADATA_NAME, StoredPiece, mark, tensor_bytes

_SIEVED_GAP_BYTES = 64
"""Smaller gaps between two runs are read with them (data sieving: Thakur, Gropp and Lusk, Frontiers 1999): a call of
its own for each run would take longer than the gap."""


@dataclass(frozen=True, slots=True)
class Runs:
    """`count` runs of `length` bytes each, their beginnings `stride` apart, the first at byte `begin` of a piece."""

    begin: int
    count: int
    length: int
    stride: int

    @property
    def are_sieved(self) -> bool:
        return self.count > 1 and self.stride - self.length < _SIEVED_GAP_BYTES

    @property
    def span(self) -> int:
        """From the first byte to the last, gaps included."""
        return (self.count - 1) * self.stride + self.length


def runs_of(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int) -> Iterator[Runs]:
    """Where the rectangle of `lengths` at `offsets` lies in a tensor of `shape` that is stored row after row, in the
    order of its elements."""
    if prod(lengths) == 0:
        return
    strides = [item_bytes * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # What lies behind the last axis that is cut is contiguous; the axis before that one counts the runs.
    cut = max((axis for axis, length in enumerate(lengths) if length < shape[axis]), default=0)
    counted = max(cut - 1, 0)
    run_bytes = item_bytes * prod(lengths[cut:])
    count = lengths[counted] if counted < cut else 1
    stride = strides[counted] if counted < cut else run_bytes
    inner = sum(offset * step for offset, step in zip(offsets[counted:], strides[counted:], strict=True))
    for place in product(*(range(begin, begin + lengths[axis]) for axis, begin in enumerate(offsets[:counted]))):
        outer = sum(index * step for index, step in zip(place, strides[:counted], strict=True))
        yield Runs(outer + inner, count, run_bytes, stride)


class SliceReader(FileSystemReader):
    """Reads a checkpoint of `pieces` for one load of a rank on `node`; `traffic` grows with it.

    Tensors on the host that lie in one run of memory are filled in place; for others, what is needed of one piece is
    read into a buffer of that size first.
    """

    def __init__(self, directory: Path, *, node: str) -> None:
        super().__init__(directory)
        self._directory = directory
        self._node = node
        self._whole: Metadata | None = None
        self._shapes: dict[MetadataIndex, torch.Size] = {}
        self.traffic = LoadTraffic()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read once, however often it is asked for.

        Raises:
            CheckpointError: the file is there and holds something else.
        """
        if self._whole is None:
            try:
                self._whole = super().read_metadata()
            except OSError:
                raise
            except Exception as wrong:  # whatever a pickle that is none may raise
                raise CheckpointError(f"{self._directory / METADATA_NAME} is not readable: {wrong}") from wrong
        return self._whole

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)
        self._shapes = {
            MetadataIndex(name, chunk.offsets): chunk.sizes
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """
        Raises:
            CheckpointError: a file is missing or too short, or holds something else than the metadata says.
        """
        by_file = defaultdict[str, list[tuple[StoredPiece, ReadItem]]](list)
        for item in plan.items:
            piece = self.storage_data[item.storage_index]
            by_file[piece.file].append((piece, item))
        for name, wanted in sorted(by_file.items()):
            with _PieceFile(self._directory / name) as file:
                for piece, item in sorted(wanted, key=lambda pair: pair[0].offset):
                    read_before = file.read_bytes
                    needed = self._read(file, piece, item, planner)
                    self._count(piece, needed=needed, read=file.read_bytes - read_before)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: _PieceFile, piece: StoredPiece, item: ReadItem, planner: LoadPlanner) -> int:
        """The bytes that were needed of this piece."""
        if item.type == LoadItemType.BYTE_IO:
            file.check_mark(piece, mark(item.storage_index))
            value = bytearray(piece.length)
            file.fill(memoryview(value), piece.offset)
            planner.load_bytes(item, io.BytesIO(value))
            return piece.length
        target = planner.resolve_tensor(item).detach()
        shape = self._shapes[item.storage_index]
        file.check_mark(piece, mark(item.storage_index, shape, target.dtype))
        is_in_place = target.device.type == "cpu" and target.is_contiguous()
        filled = target if is_in_place else torch.empty(target.shape, dtype=target.dtype)
        content = tensor_bytes(filled)
        for runs in runs_of(shape, item.storage_offsets, item.lengths, target.itemsize):
            taken = runs.count * runs.length
            file.fill_from_runs(content[:taken], piece.offset, runs)
            content = content[taken:]
        if not is_in_place:
            target.copy_(filled)
        planner.commit_tensor(item, target)
        return filled.nbytes

    def _count(self, piece: StoredPiece, *, needed: int, read: int) -> None:
        moved = 0 if piece.node == self._node else read
        self.traffic += LoadTraffic(needed, read, moved)


class _PieceFile:
    """One file of pieces, open for reading, with a count of the bytes that were read from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.read_bytes = 0

    def __enter__(self) -> _PieceFile:
        self._fd = os.open(self._path, os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def check_mark(self, piece: StoredPiece, expected: bytes) -> None:
        found = bytearray(len(expected))
        self.fill(memoryview(found), piece.offset - len(expected))
        if found != expected:
            named = expected.decode().strip()
            raise CheckpointError(f"{self._path}: before byte {piece.offset} stands no mark of {named!r}")

    def fill_from_runs(self, content: memoryview, offset: int, runs: Runs) -> None:
        """Fill `content` with runs that count from `offset` of the file."""
        begin = offset + runs.begin
        if runs.are_sieved:
            span = torch.empty(runs.span, dtype=torch.uint8)
            self.fill(tensor_bytes(span), begin)
            rows = torch.frombuffer(content, dtype=torch.uint8).view(runs.count, runs.length)
            rows.copy_(span.as_strided((runs.count, runs.length), (runs.stride, 1)))
            return
        for number in range(runs.count):
            at = number * runs.length
            self.fill(content[at : at + runs.length], begin + number * runs.stride)

    def fill(self, content: memoryview, offset: int) -> None:
        while content:
            count = os.preadv(self._fd, [content], offset)
            if count == 0:
                raise CheckpointError(f"{self._path}: it ends at byte {offset}, {len(content)} bytes too early")
            self.read_bytes += count
            content, offset = content[count:], offset + count
