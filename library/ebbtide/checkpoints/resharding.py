"""Rewriting of a checkpoint so that each rank of a plan finds its shards in a file of its own."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ebbtide.checkpoints.errors import CheckpointError
from ebbtide.checkpoints.loading import convert_load_error
from ebbtide.checkpoints.piece_reader import PieceReader
from ebbtide.checkpoints.piece_writer import PieceWriter
from ebbtide.rank_status import LoadTraffic


@dataclass(frozen=True)
class TensorPart:
    """A part of the tensor `name`: where it begins in each dimension, and its shape."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """Shape and size of the elements of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    element_bytes: int


def list_stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name.

    Raises:
        CheckpointError: the metadata is missing, damaged or of another version.
        OSError: it cannot be read.
    """
    entries = PieceReader(directory, node="").read_metadata().state_dict_metadata
    return {
        name: StoredTensor(tuple(entry.size), entry.properties.dtype.itemsize)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def reshard_checkpoint(source: Path, target: Path, held_by_rank: Sequence[Sequence[TensorPart]]) -> LoadTraffic:
    """Write the checkpoint `source` to `target` with one file per rank, and return what was read.

    A part that several ranks hold is stored once, by the rank that stores the least so far. Values that are no tensors,
    and tensors that no rank holds, are stored by rank 0.

    Raises:
        DamagedCheckpointError: a checksum differs.
        CheckpointError: `target` exists or cannot be written.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists. Name a new one, or delete it first.")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    reader = PieceReader(source, node="")
    try:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        partial.mkdir(parents=True)
        planner, writer = _CopyPlanner(reader, metadata), PieceWriter(partial, node="")
        parts_by_rank = _divide_parts(metadata, held_by_rank)
        plans = writer.prepare_global_plan([planner.plan_rank(parts) for parts in parts_by_rank])
        results = [writer.write_data(plan, planner).wait() for plan in plans]
        writer.finish(planner.describe_target(parts_by_rank), results)
        partial.rename(target)
    except (OSError, CheckpointException) as error:
        raise convert_load_error(source, error) from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)
    return reader.traffic


def _divide_parts(metadata: Metadata, held_by_rank: Sequence[Sequence[TensorPart]]) -> list[list[TensorPart]]:
    """Return the parts that each rank stores."""
    holders: dict[TensorPart, list[int]] = {}
    for rank, parts in enumerate(held_by_rank):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    held_names = {part.name for part in holders}
    for name, entry in metadata.state_dict_metadata.items():
        if name not in held_names:
            shape = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else ()
            holders[TensorPart(name, (0,) * len(shape), shape)] = [0]
    stored: list[list[TensorPart]] = [[] for _ in held_by_rank]
    elements = [0] * len(held_by_rank)
    for part, ranks in holders.items():
        rank = min(ranks, key=lambda each: elements[each])
        stored[rank].append(part)
        elements[rank] += prod(part.lengths)
    return stored


class _CopyPlanner(DefaultSavePlanner):
    """Save planner whose values are read from another checkpoint at the moment at which they are written."""

    def __init__(self, reader: PieceReader, metadata: Metadata) -> None:
        super().__init__()
        self._reader = reader
        self._source = metadata

    def plan_rank(self, parts: Sequence[TensorPart]) -> SavePlan:
        return SavePlan([self._create_item(part) for part in parts])

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            return self._read_value(write_item.index)
        entry = self._source.state_dict_metadata[write_item.index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = write_item.tensor_data.chunk
        target = torch.empty(chunk.sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(write_item.index.fqn, entry, [chunk])
        self._reader.read_data(LoadPlan(items), _PartPlanner(target)).wait()
        return target

    def describe_target(self, parts_by_rank: Sequence[Sequence[TensorPart]]) -> Metadata:
        """Return the metadata of the new checkpoint."""
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for parts in parts_by_rank:
            for part in parts:
                chunks.setdefault(part.name, []).append(_describe_chunk(part))
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: TensorStorageMetadata(entry.properties, entry.size, chunks[name])
            if isinstance(entry, TensorStorageMetadata)
            else entry
            for name, entry in self._source.state_dict_metadata.items()
        }
        return Metadata(entries, planner_data=self._source.planner_data)

    def _create_item(self, part: TensorPart) -> WriteItem:
        entry = self._source.state_dict_metadata[part.name]
        if not isinstance(entry, TensorStorageMetadata):
            return WriteItem(MetadataIndex(part.name), WriteItemType.BYTE_IO)
        chunk = _describe_chunk(part)
        data = TensorWriteData(chunk, entry.properties, entry.size)
        return WriteItem(MetadataIndex(part.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def _read_value(self, index: MetadataIndex) -> io.BytesIO:
        planner, nowhere = _ValuePlanner(), torch.Size(())
        item = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
        self._reader.read_data(LoadPlan([item]), planner).wait()
        return planner.value


class _PartPlanner(DefaultLoadPlanner):
    """Load planner for one part of one tensor, which begins at the first element of `target`."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._target
        for axis, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, begin, length)
        return part


class _ValuePlanner(DefaultLoadPlanner):
    """Load planner that keeps the bytes of a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.value = io.BytesIO()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = value


def _describe_chunk(part: TensorPart) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.lengths))
