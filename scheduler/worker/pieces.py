"""Pieces: how a checkpoint holds its tensors, so that any part of one can be read alone.

A piece is what one rank saved of one tensor, or of one value that is none: its mark, which names it, padded to a
multiple of 64 bytes, then its bytes, row after row for a tensor, padded likewise. Each rank writes its pieces one after
the other into a file of its own. `.metadata` says which pieces there are, in the form of torch.distributed.checkpoint,
whose planners decide who saves what.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

METADATA_NAME = ".metadata"
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """`offset` is where its bytes begin in `file`, behind its mark; `node` is the one on which it was written."""

    file: str
    offset: int
    length: int
    node: str


def mark(index: MetadataIndex, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> bytes:
    """What stands before a piece: its name, where in the whole tensor it begins, its shape and type of element; of what
    is no tensor the name alone."""
    if dtype is None:
        text = f"piece {index.fqn}\n"
    else:
        text = f"piece {index.fqn} at {list(index.offset or ())} {list(shape)} {str(dtype).removeprefix('torch.')}\n"
    return _padded(text.encode())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor on the host, the memory itself, whatever its type of element."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class PieceWriter(StorageWriter):
    """Writes the pieces of one rank, whose `node` they will bear; of rank 0 also the metadata of all."""

    def __init__(self, directory: Path, *, rank: int, node: str) -> None:
        self._directory = directory
        self._file = f"__{rank}_0.distcp"
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
        with (self._directory / self._file).open("wb") as stream:
            results = [self._write(stream, item, planner) for item in plan.items]
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

    def _write(self, stream: BinaryIO, item: WriteItem, planner: SavePlanner) -> WriteResult:
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            head, body = mark(item.index), data.getbuffer()
        else:
            whole = data.detach().cpu().contiguous()
            head, body = mark(item.index, whole.shape, whole.dtype), tensor_bytes(whole)
        stream.write(head)
        piece = StoredPiece(self._file, stream.tell(), body.nbytes, self._node)
        stream.write(body)
        stream.write(bytes(-body.nbytes % _ALIGNMENT_BYTES))
        return WriteResult(item.index, body.nbytes, piece)


def _padded(text: bytes) -> bytes:
    return text.ljust(-(-len(text) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
