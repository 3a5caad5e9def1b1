"""Pieces: how a checkpoint holds its tensors, so that any part of one can be read alone.

A piece is what one rank saved of one tensor, or of one value that is none: its mark, which names it, padded to a
multiple of 64 bytes, then its bytes, row after row for a tensor, padded likewise. Each rank writes its pieces one after
the other into a file of its own. `.metadata` says which pieces there are, in the form of torch.distributed.checkpoint,
whose planners decide who saves what.

SliceReader: fills the tensors of a rank from a checkpoint, and reads no more of each stored piece than it needs.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from scheduler.domain.job_records import LoadTraffic
from scheduler.trainer.checkpoint_manifest import CheckpointError

METADATA_NAME = ".metadata"
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """`offset` is where its bytes begin in `file`, behind its mark; `node` is the one on which it was written."""

    file: str
    offset: int
    length: int
    node: str


def build_piece_header(index: MetadataIndex, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> bytes:
    """What stands before a piece: its name, where in the whole tensor it begins, its shape and type of element; of what
    is no tensor the name alone."""
    if dtype is None:
        text = f"piece {index.fqn}\n"
    else:
        text = f"piece {index.fqn} at {list(index.offset or ())} {list(shape)} {str(dtype).removeprefix('torch.')}\n"
    return _pad(text.encode())


def view_tensor_bytes(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor on the host, the memory itself, whatever its type of element."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class PieceWriter(StorageWriter):
    """Writes the pieces of one rank, whose `node` they will bear; of rank 0 also the metadata of all."""

    def __init__(self, directory: Path, *, rank: int, node: str) -> None:
        self._directory = directory
        self._file_name = f"__{rank}_0.distcp"
        self._node = node

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer is for one checkpoint, so there is nothing to forget."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Ranks and coordinator write alike."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with (self._directory / self._file_name).open("wb") as stream:
            results = [self._write_piece(stream, item, planner) for item in plan.items]
            stream.flush()
            os.fsync(stream.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        with (self._directory / METADATA_NAME).open("wb") as stream:
            pickle.dump(metadata, stream)
            stream.flush()
            os.fsync(stream.fileno())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def _write_piece(self, stream: BinaryIO, item: WriteItem, planner: SavePlanner) -> WriteResult:
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            head, body = build_piece_header(item.index), data.getbuffer()
        else:
            whole = data.detach().cpu().contiguous()
            head, body = build_piece_header(item.index, whole.shape, whole.dtype), view_tensor_bytes(whole)
        stream.write(head)
        piece = StoredPiece(self._file_name, stream.tell(), body.nbytes, self._node)
        stream.write(body)
        stream.write(bytes(-body.nbytes % _ALIGNMENT_BYTES))
        return WriteResult(item.index, body.nbytes, piece)


def _pad(text: bytes) -> bytes:
    return text.ljust(-(-len(text) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)


_MAX_SIEVED_GAP_BYTES = 64
"""Smaller gaps between two runs are read with them (data sieving: Thakur, Gropp and Lusk, Frontiers 1999): a call of
its own for each run would take longer than the gap."""


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """`count` runs of `length` bytes each, their beginnings `stride` apart, the first at byte `begin` of a piece."""

    begin: int
    count: int
    length: int
    stride: int

    @property
    def is_sieved(self) -> bool:
        return self.count > 1 and self.stride - self.length < _MAX_SIEVED_GAP_BYTES

    @property
    def span(self) -> int:
        """From the first byte to the last, gaps included."""
        return (self.count - 1) * self.stride + self.length


def compute_byte_runs(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int
) -> Iterator[ByteRuns]:
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
        yield ByteRuns(outer + inner, count, run_bytes, stride)


class PieceReader(FileSystemReader):
    """Reads a checkpoint of `pieces` for one load of a rank on `node`; `traffic` grows with it.

    Tensors on the host that lie in one run of memory are filled in place; for others, what is needed of one piece is
    read into a buffer of that size first.
    """

    def __init__(self, directory: Path, *, node: str) -> None:
        super().__init__(directory)
        self._directory = directory
        self._node = node
        self._cached_metadata: Metadata | None = None
        self._piece_shapes: dict[MetadataIndex, torch.Size] = {}
        self.traffic = LoadTraffic()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read once, however often it is asked for.

        Raises:
            CheckpointError: the file is there and holds something else.
        """
        if self._cached_metadata is None:
            try:
                self._cached_metadata = super().read_metadata()
            except OSError:
                raise
            except Exception as wrong:  # whatever a pickle that is none may raise
                raise CheckpointError(f"{self._directory / METADATA_NAME} is not readable: {wrong}") from wrong
        return self._cached_metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)
        self._piece_shapes = {
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
                    needed = self._read_piece(file, piece, item, planner)
                    self._add_traffic(piece, needed=needed, read=file.read_bytes - read_before)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_piece(self, file: _PieceFile, piece: StoredPiece, item: ReadItem, planner: LoadPlanner) -> int:
        """The bytes that were needed of this piece."""
        if item.type == LoadItemType.BYTE_IO:
            file.verify_header(piece, build_piece_header(item.storage_index))
            value = bytearray(piece.length)
            file.read_into(memoryview(value), piece.offset)
            planner.load_bytes(item, io.BytesIO(value))
            return piece.length
        target = planner.resolve_tensor(item).detach()
        shape = self._piece_shapes[item.storage_index]
        file.verify_header(piece, build_piece_header(item.storage_index, shape, target.dtype))
        is_in_place = target.device.type == "cpu" and target.is_contiguous()
        filled = target if is_in_place else torch.empty(target.shape, dtype=target.dtype)
        content = view_tensor_bytes(filled)
        for runs in compute_byte_runs(shape, item.storage_offsets, item.lengths, target.itemsize):
            taken = runs.count * runs.length
            file.read_runs_into(content[:taken], piece.offset, runs)
            content = content[taken:]
        if not is_in_place:
            target.copy_(filled)
        planner.commit_tensor(item, target)
        return filled.nbytes

    def _add_traffic(self, piece: StoredPiece, *, needed: int, read: int) -> None:
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

    def verify_header(self, piece: StoredPiece, expected: bytes) -> None:
        found = bytearray(len(expected))
        self.read_into(memoryview(found), piece.offset - len(expected))
        if found != expected:
            named = expected.decode().strip()
            raise CheckpointError(f"{self._path}: before byte {piece.offset} stands no mark of {named!r}")

    def read_runs_into(self, content: memoryview, offset: int, runs: ByteRuns) -> None:
        """Fill `content` with runs that count from `offset` of the file."""
        begin = offset + runs.begin
        if runs.is_sieved:
            span = torch.empty(runs.span, dtype=torch.uint8)
            self.read_into(view_tensor_bytes(span), begin)
            rows = torch.frombuffer(content, dtype=torch.uint8).view(runs.count, runs.length)
            rows.copy_(span.as_strided((runs.count, runs.length), (runs.stride, 1)))
            return
        for number in range(runs.count):
            at = number * runs.length
            self.read_into(content[at : at + runs.length], begin + number * runs.stride)

    def read_into(self, content: memoryview, offset: int) -> None:
        while content:
            count = os.preadv(self._fd, [content], offset)
            if count == 0:
                raise CheckpointError(f"{self._path}: it ends at byte {offset}, {len(content)} bytes too early")
            self.read_bytes += count
            content, offset = content[count:], offset + count
