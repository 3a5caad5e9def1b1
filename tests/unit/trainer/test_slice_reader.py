"""Parts of stored tensors come back bit by bit, and no more is read than they need."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from scheduler.domain.job_records import LoadTraffic
from scheduler.trainer.checkpoint_manifest import CheckpointError
from scheduler.trainer.checkpoint_storage import ByteRuns, PieceReader, PieceWriter, compute_byte_runs

MARK_BYTES = 64
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool)


@dataclass(frozen=True, slots=True)
class Rectangle:
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        for axis, (begin, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            whole = whole.narrow(axis, begin, length)
        return whole

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.lengths))


class OneTensorSaved(DefaultSavePlanner):
    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self.part = part

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.part


class OneTensorLoaded(DefaultLoadPlanner):
    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return Rectangle(tuple(read_item.dest_offsets), tuple(read_item.lengths)).of(self.target)


def everything(whole: Tensor) -> Rectangle:
    return Rectangle((0,) * whole.dim(), tuple(whole.shape))


def cut(whole: Tensor, axis: int, at: Sequence[int]) -> list[Rectangle]:
    """Pieces along one axis, from one place to the next."""
    ends = [0, *at, whole.shape[axis]]
    full = everything(whole)
    return [
        Rectangle(
            (*full.offsets[:axis], begin, *full.offsets[axis + 1 :]),
            (*full.lengths[:axis], end - begin, *full.lengths[axis + 1 :]),
        )
        for begin, end in pairwise(ends)
    ]


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    seeded = torch.Generator().manual_seed(prod(shape))
    content = torch.randint(0, 2 if dtype is torch.bool else 256, (prod(shape) * dtype.itemsize,), generator=seeded)
    return content.to(torch.uint8).view(dtype).view(tuple(shape))


def saved(folder: Path, whole: Tensor, pieces: Sequence[Rectangle], *, by_torch: bool = False) -> Metadata:
    """Tensor "w", of which rank k, on node "n<k>", wrote the k-th piece."""
    results: list[list[WriteResult]] = []
    properties = TensorProperties(dtype=whole.dtype)
    for rank, piece in enumerate(pieces):
        index = MetadataIndex("w", piece.chunk.offsets, rank)
        data = TensorWriteData(piece.chunk, properties, whole.size())
        plan = SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=data)])
        writer: StorageWriter = PieceWriter(folder, rank=rank, node=f"n{rank}")
        if by_torch:
            writer = FileSystemWriter(folder)
            plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
        results.append(writer.write_data(plan, OneTensorSaved(piece.of(whole))).wait())
    entry = TensorStorageMetadata(properties, whole.size(), [piece.chunk for piece in pieces])
    metadata = Metadata({"w": entry})
    writer.finish(metadata, results)
    return metadata


def loaded(reader: StorageReader, wanted: Rectangle, target: Tensor) -> Tensor:
    """What `target` holds after `wanted` of tensor "w" was read into it."""
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    items = create_read_items_for_chunk_list("w", entry, [wanted.chunk])
    reader.read_data(LoadPlan(items), OneTensorLoaded(target)).wait()
    return target


def read_back(folder: Path, whole: Tensor, wanted: Rectangle, *, node: str = "n0") -> LoadTraffic:
    """What it took to read this part, which is bit-equal."""
    reader = PieceReader(folder, node=node)
    expected = wanted.of(whole)
    got = loaded(reader, wanted, torch.zeros(expected.shape, dtype=whole.dtype))
    assert got.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))
    return reader.traffic


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_part_of_any_tensor_however_it_is_cut_comes_back_as_torch_reads_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), max_size=3))
    whole = random_tensor(shape, data.draw(st.sampled_from(DTYPES)))
    pieces = [everything(whole)]
    if shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.sets(st.integers(1, shape[axis] - 1), max_size=3)) if shape[axis] > 1 else set[int]()
        pieces = cut(whole, axis, sorted(at))
    offsets = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    lengths = tuple(data.draw(st.integers(1, length - begin)) for length, begin in zip(shape, offsets, strict=True))
    wanted = Rectangle(offsets, lengths)
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = Path(name, "ours"), Path(name, "theirs")
        ours.mkdir()
        theirs.mkdir()
        saved(ours, whole, pieces)
        saved(theirs, whole, pieces, by_torch=True)
        traffic = read_back(ours, whole, wanted)
        reference = loaded(FileSystemReader(theirs), wanted, torch.zeros(lengths, dtype=whole.dtype))
        assert reference.view(-1).view(torch.uint8).equal(wanted.of(whole).contiguous().view(-1).view(torch.uint8))
        assert traffic.needed_bytes == prod(lengths) * whole.itemsize
        assert traffic.needed_bytes <= traffic.read_bytes


@given(st.data())
def test_runs_are_the_elements_of_the_rectangle_in_their_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [data.draw(st.integers(0, length - 1)) for length in shape]
    lengths = [data.draw(st.integers(0, length - begin)) for length, begin in zip(shape, offsets, strict=True)]
    elements = torch.arange(prod(shape)).view(shape)
    read = [
        runs.begin + number * runs.stride + byte
        for runs in compute_byte_runs(shape, offsets, lengths, 1)
        for number in range(runs.count)
        for byte in range(runs.length)
    ]
    assert read == Rectangle(tuple(offsets), tuple(lengths)).of(elements).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_read_alone_and_in_one_run(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = random_tensor((100, 30), dtype)
    saved(tmp_path, whole, [everything(whole)])
    wanted = Rectangle((37, 0), (26, 30))
    assert list(compute_byte_runs(whole.shape, wanted.offsets, wanted.lengths, 1)) == [ByteRuns(1110, 1, 780, 780)]
    needed = 26 * 30 * whole.itemsize
    assert read_back(tmp_path, whole, wanted) == LoadTraffic(needed, needed + MARK_BYTES, 0)


def test_columns_are_read_alone_where_they_are_wide(tmp_path: Path) -> None:
    whole = random_tensor((50, 64), torch.float32)
    saved(tmp_path, whole, [everything(whole)])
    needed = 50 * 32 * 4
    assert read_back(tmp_path, whole, Rectangle((0, 32), (50, 32))) == LoadTraffic(needed, needed + MARK_BYTES, 0)


def test_small_gaps_are_read_with_the_columns_and_counted(tmp_path: Path) -> None:
    whole = random_tensor((50, 20), torch.float32)
    saved(tmp_path, whole, [everything(whole)])
    traffic = read_back(tmp_path, whole, Rectangle((0, 4), (50, 10)))
    assert traffic == LoadTraffic(50 * 10 * 4, 49 * 20 * 4 + 10 * 4 + MARK_BYTES, 0)


def test_of_uneven_pieces_only_those_are_touched_that_hold_something_and_the_others_nodes_are_counted(
    tmp_path: Path,
) -> None:
    whole = random_tensor((11, 40), torch.float64)
    saved(tmp_path, whole, cut(whole, 0, [4, 8]))
    (tmp_path / "__2_0.distcp").unlink()
    row = 40 * 8
    for node, moved in (("n0", 3 * row + MARK_BYTES), ("n1", row + MARK_BYTES), ("n7", 4 * row + 2 * MARK_BYTES)):
        traffic = read_back(tmp_path, whole, Rectangle((3, 0), (4, 40)), node=node)
        assert traffic == LoadTraffic(4 * row, 4 * row + 2 * MARK_BYTES, moved)


def test_scalars_and_empty_tensors_come_back(tmp_path: Path) -> None:
    for shape in ((), (0,), (3, 0)):
        folder = tmp_path / f"{len(shape)}"
        folder.mkdir()
        whole = random_tensor(shape, torch.float32)
        saved(folder, whole, [everything(whole)])
        traffic = read_back(folder, whole, everything(whole))
        assert traffic.needed_bytes == whole.nbytes


def test_a_target_that_is_no_single_run_of_memory_is_filled_and_its_neighbours_are_left(tmp_path: Path) -> None:
    whole = random_tensor((6, 32), torch.float32)
    saved(tmp_path, whole, cut(whole, 1, [16]))
    wider = torch.zeros(6, 40, dtype=torch.float32)
    loaded(PieceReader(tmp_path, node="n0"), everything(whole), wider[:, :32])
    assert wider[:, :32].view(torch.int32).equal(whole.view(torch.int32))
    assert not wider[:, 32:].any()


def test_another_type_of_element_or_another_piece_in_its_place_is_refused_by_name(tmp_path: Path) -> None:
    whole = random_tensor((8, 8), torch.float32)
    saved(tmp_path, whole, [everything(whole)])
    reader = PieceReader(tmp_path, node="n0")
    message = r"__0_0.distcp: before byte 64 stands no mark of 'piece w at \[0, 0\] \[8, 8\] float64'"
    with pytest.raises(CheckpointError, match=message):
        loaded(reader, everything(whole), torch.zeros(8, 8, dtype=torch.float64))
    (tmp_path / "__0_0.distcp").write_bytes(bytes((tmp_path / "__0_0.distcp").stat().st_size))
    with pytest.raises(CheckpointError, match="stands no mark of 'piece w at"):
        read_back(tmp_path, whole, everything(whole))


def test_a_file_that_is_too_short_or_gone_is_refused_by_name(tmp_path: Path) -> None:
    whole = random_tensor((8, 8), torch.float32)
    saved(tmp_path, whole, [everything(whole)])
    os.truncate(tmp_path / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: it ends at byte 100, 220 bytes too early"):
        read_back(tmp_path, whole, everything(whole))
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp"):
        read_back(tmp_path, whole, everything(whole))


def test_metadata_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04 nothing")
    with pytest.raises(CheckpointError, match=r"\.metadata is not readable: "):
        PieceReader(tmp_path, node="n0").read_metadata()
