"""How a checkpoint stores tensors, so that a rank reads only the bytes it needs.

A piece is the part of one tensor or other value that one rank saved. It is stored as a header that names it, padded to
a multiple of 64 bytes, followed by its bytes (row-major for a tensor), padded likewise. Each rank writes its pieces to
a file of its own. `.metadata` lists all pieces in the format of torch.distributed.checkpoint, whose planners decide
which rank saves what.
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
# Gaps smaller than this are read together with their runs (data sieving: Thakur, Gropp and Lusk, Frontiers 1999),
# because a system call per run takes longer than reading the gap.
_MAX_SIEVED_GAP_BYTES = 64
# Checkpoints are pickled with the module name of `StoredPiece`. Older ones have this name.
_FORMER_MODULE = "scheduler.worker.pieces"


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Location of a piece.

    Attributes:
        offset: position in `file` of its first byte, behind the header.
        length: in bytes, without padding.
        node: the node on which it was written.
    """

    file: str
    offset: int
    length: int
    node: str


def build_piece_header(index: MetadataIndex, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> bytes:
    """Return the header of a piece: its name and, for a tensor, its offset in the whole tensor, shape and dtype."""
    if dtype is None:
        text = f"piece {index.fqn}\n"
    else:
        text = f"piece {index.fqn} at {list(index.offset or ())} {list(shape)} {str(dtype).removeprefix('torch.')}\n"
    return _pad(text.encode())


def view_tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class PieceWriter(StorageWriter):
    """Writer of the pieces of one rank, and on rank 0 of the metadata of all ranks."""

    def __init__(self, directory: Path, *, rank: int, node: str) -> None:
        self._directory = directory
        self._file_name = f"__{rank}_0.distcp"
        self._node = node

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a writer is used for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up, because all ranks write in the same way."""

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
            header, body = build_piece_header(item.index), data.getbuffer()
        else:
            tensor = data.detach().cpu().contiguous()
            header, body = build_piece_header(item.index, tensor.shape, tensor.dtype), view_tensor_bytes(tensor)
        stream.write(header)
        piece = StoredPiece(self._file_name, stream.tell(), body.nbytes, self._node)
        stream.write(body)
        stream.write(bytes(-body.nbytes % _ALIGNMENT_BYTES))
        return WriteResult(item.index, body.nbytes, piece)


def _pad(text: bytes) -> bytes:
    return text.ljust(-(-len(text) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Equally spaced runs of bytes in a piece: `count` runs of `length` bytes, `stride` apart, the first at `begin`."""

    begin: int
    count: int
    length: int
    stride: int

    @property
    def is_sieved(self) -> bool:
        return self.count > 1 and self.stride - self.length < _MAX_SIEVED_GAP_BYTES

    @property
    def span(self) -> int:
        """Number of bytes from the first to the last, including gaps."""
        return (self.count - 1) * self.stride + self.length


def compute_byte_runs(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int
) -> Iterator[ByteRuns]:
    """Yield the positions of a part of a tensor in its row-major bytes, in the order of the part's elements.

    Args:
        shape: shape of the stored tensor.
        offsets: where the part begins in each dimension.
        lengths: shape of the part.
        item_bytes: bytes per element.
    """
    if prod(lengths) == 0:
        return
    strides = [item_bytes * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # Everything behind the last axis that is cut is contiguous. The axis before it counts the runs.
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
    """Reader of the pieces that one rank on `node` needs. It counts their bytes in `traffic`.

    Contiguous tensors on the host are filled in place. Other tensors are read into a buffer of the needed size
    first.
    """

    def __init__(self, directory: Path, *, node: str) -> None:
        super().__init__(directory)
        self._directory = directory
        self._node = node
        self._cached_metadata: Metadata | None = None
        self._piece_shapes: dict[MetadataIndex, torch.Size] = {}
        self.traffic = LoadTraffic()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, which is read once.

        Raises:
            CheckpointError: the file is not valid metadata.
        """
        if self._cached_metadata is None:
            path = self._directory / METADATA_NAME
            try:
                with path.open("rb") as stream:
                    self._cached_metadata = _MetadataUnpickler(stream).load()
            except OSError:
                raise
            except Exception as error:  # an invalid pickle may raise any exception
                raise CheckpointError(f"{path} is not readable: {error}") from error
            if not isinstance(self._cached_metadata, Metadata):
                raise CheckpointError(f"{path} is not readable: it contains no metadata")
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
        """Fill the tensors of the plan.

        Raises:
            CheckpointError: a file is missing, too short, or does not match the metadata.
        """
        by_file = defaultdict[str, list[tuple[StoredPiece, ReadItem]]](list)
        for item in plan.items:
            piece = self.storage_data[item.storage_index]
            by_file[piece.file].append((piece, item))
        for name, reads in sorted(by_file.items()):
            with _PieceFile(self._directory / name) as file:
                for piece, item in sorted(reads, key=lambda pair: pair[0].offset):
                    read_before = file.read_bytes
                    needed = self._read_piece(file, piece, item, planner)
                    self._add_traffic(piece, needed=needed, read=file.read_bytes - read_before)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_piece(self, file: _PieceFile, piece: StoredPiece, item: ReadItem, planner: LoadPlanner) -> int:
        """Read the needed part of one piece and return its size in bytes."""
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
        buffer = target if is_in_place else torch.empty(target.shape, dtype=target.dtype)
        content = view_tensor_bytes(buffer)
        for runs in compute_byte_runs(shape, item.storage_offsets, item.lengths, target.itemsize):
            length = runs.count * runs.length
            file.read_runs_into(content[:length], piece.offset, runs)
            content = content[length:]
        if not is_in_place:
            target.copy_(buffer)
        planner.commit_tensor(item, target)
        return buffer.nbytes

    def _add_traffic(self, piece: StoredPiece, *, needed: int, read: int) -> None:
        moved = 0 if piece.node == self._node else read
        self.traffic += LoadTraffic(needed, read, moved)


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that finds `StoredPiece` in checkpoints that were saved when it was in another module."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(__name__ if module == _FORMER_MODULE else module, name)


class _PieceFile:
    """A file of pieces that is open for reading and counts the bytes read from it."""

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
        header = bytearray(len(expected))
        self.read_into(memoryview(header), piece.offset - len(expected))
        if header != expected:
            name = expected.decode().strip()
            raise CheckpointError(f"{self._path}: no header {name!r} before byte {piece.offset}")

    def read_runs_into(self, content: memoryview, offset: int, runs: ByteRuns) -> None:
        """Fill `content` with the runs of the piece whose data begins at `offset`."""
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
                raise CheckpointError(f"{self._path} ends at byte {offset}, {len(content)} bytes too early")
            self.read_bytes += count
            content, offset = content[count:], offset + count
