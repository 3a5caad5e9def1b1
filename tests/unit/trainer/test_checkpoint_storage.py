"""Storage of checkpoints: any part of a stored tensor can be read, and no more is read than it needs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import ModuleType

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
from scheduler.trainer.checkpoint_storage import ByteRuns, PieceReader, PieceWriter, StoredPiece, compute_byte_runs

HEADER_BYTES = 64
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool)


@dataclass(frozen=True, slots=True)
class Rectangle:
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def select(self, whole: Tensor) -> Tensor:
        for axis, (begin, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            whole = whole.narrow(axis, begin, length)
        return whole

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.lengths))


class SingleTensorSavePlanner(DefaultSavePlanner):
    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self.part = part

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.part


class SingleTensorLoadPlanner(DefaultLoadPlanner):
    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return Rectangle(tuple(read_item.dest_offsets), tuple(read_item.lengths)).select(self.target)


def full_rectangle(whole: Tensor) -> Rectangle:
    return Rectangle((0,) * whole.dim(), tuple(whole.shape))


def split(whole: Tensor, axis: int, at: Sequence[int]) -> list[Rectangle]:
    """Return the pieces of `whole`, split along one axis at these positions."""
    ends = [0, *at, whole.shape[axis]]
    full = full_rectangle(whole)
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


def save(folder: Path, whole: Tensor, pieces: Sequence[Rectangle], *, by_torch: bool = False) -> Metadata:
    """Write tensor "w". Rank k, on node "n<k>", writes the k-th piece."""
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
        results.append(writer.write_data(plan, SingleTensorSavePlanner(piece.select(whole))).wait())
    entry = TensorStorageMetadata(properties, whole.size(), [piece.chunk for piece in pieces])
    metadata = Metadata({"w": entry})
    writer.finish(metadata, results)
    return metadata


def load(reader: StorageReader, wanted: Rectangle, target: Tensor) -> Tensor:
    """Read the part `wanted` of tensor "w" into `target` and return it."""
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    items = create_read_items_for_chunk_list("w", entry, [wanted.chunk])
    reader.read_data(LoadPlan(items), SingleTensorLoadPlanner(target)).wait()
    return target


def read_back(folder: Path, whole: Tensor, wanted: Rectangle, *, node: str = "n0") -> LoadTraffic:
    """Read a part, check that it is bitwise equal, and return the traffic."""
    reader = PieceReader(folder, node=node)
    expected = wanted.select(whole)
    target = load(reader, wanted, torch.zeros(expected.shape, dtype=whole.dtype))
    assert target.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))
    return reader.traffic


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_part_of_any_tensor_is_read_as_torch_reads_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), max_size=3))
    whole = random_tensor(shape, data.draw(st.sampled_from(DTYPES)))
    pieces = [full_rectangle(whole)]
    if shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.sets(st.integers(1, shape[axis] - 1), max_size=3)) if shape[axis] > 1 else set[int]()
        pieces = split(whole, axis, sorted(at))
    offsets = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    lengths = tuple(data.draw(st.integers(1, length - begin)) for length, begin in zip(shape, offsets, strict=True))
    wanted = Rectangle(offsets, lengths)
    with tempfile.TemporaryDirectory() as name:
        own_folder, torch_folder = Path(name, "own"), Path(name, "torch")
        own_folder.mkdir()
        torch_folder.mkdir()
        save(own_folder, whole, pieces)
        save(torch_folder, whole, pieces, by_torch=True)
        traffic = read_back(own_folder, whole, wanted)
        reference = load(FileSystemReader(torch_folder), wanted, torch.zeros(lengths, dtype=whole.dtype))
        assert reference.view(-1).view(torch.uint8).equal(wanted.select(whole).contiguous().view(-1).view(torch.uint8))
        assert traffic.needed_bytes == prod(lengths) * whole.itemsize
        assert traffic.needed_bytes <= traffic.read_bytes


@given(st.data())
def test_byte_runs_cover_the_elements_of_a_part_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [data.draw(st.integers(0, length - 1)) for length in shape]
    lengths = [data.draw(st.integers(0, length - begin)) for length, begin in zip(shape, offsets, strict=True)]
    elements = torch.arange(prod(shape)).view(shape)
    bytes_read = [
        runs.begin + number * runs.stride + byte
        for runs in compute_byte_runs(shape, offsets, lengths, 1)
        for number in range(runs.count)
        for byte in range(runs.length)
    ]
    assert bytes_read == Rectangle(tuple(offsets), tuple(lengths)).select(elements).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_read_in_one_run(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = random_tensor((100, 30), dtype)
    save(tmp_path, whole, [full_rectangle(whole)])
    wanted = Rectangle((37, 0), (26, 30))
    assert list(compute_byte_runs(whole.shape, wanted.offsets, wanted.lengths, 1)) == [ByteRuns(1110, 1, 780, 780)]
    needed = 26 * 30 * whole.itemsize
    assert read_back(tmp_path, whole, wanted) == LoadTraffic(needed, needed + HEADER_BYTES, 0)


def test_wide_columns_are_read_without_their_gaps(tmp_path: Path) -> None:
    whole = random_tensor((50, 64), torch.float32)
    save(tmp_path, whole, [full_rectangle(whole)])
    needed = 50 * 32 * 4
    assert read_back(tmp_path, whole, Rectangle((0, 32), (50, 32))) == LoadTraffic(needed, needed + HEADER_BYTES, 0)


def test_small_gaps_are_read_and_counted(tmp_path: Path) -> None:
    whole = random_tensor((50, 20), torch.float32)
    save(tmp_path, whole, [full_rectangle(whole)])
    traffic = read_back(tmp_path, whole, Rectangle((0, 4), (50, 10)))
    assert traffic == LoadTraffic(50 * 10 * 4, 49 * 20 * 4 + 10 * 4 + HEADER_BYTES, 0)


def test_only_needed_pieces_are_read_and_bytes_of_other_nodes_are_counted(
    tmp_path: Path,
) -> None:
    whole = random_tensor((11, 40), torch.float64)
    save(tmp_path, whole, split(whole, 0, [4, 8]))
    (tmp_path / "__2_0.distcp").unlink()
    row = 40 * 8
    for node, moved in (("n0", 3 * row + HEADER_BYTES), ("n1", row + HEADER_BYTES), ("n7", 4 * row + 2 * HEADER_BYTES)):
        traffic = read_back(tmp_path, whole, Rectangle((3, 0), (4, 40)), node=node)
        assert traffic == LoadTraffic(4 * row, 4 * row + 2 * HEADER_BYTES, moved)


def test_scalars_and_empty_tensors_can_be_read(tmp_path: Path) -> None:
    for shape in ((), (0,), (3, 0)):
        folder = tmp_path / f"{len(shape)}"
        folder.mkdir()
        whole = random_tensor(shape, torch.float32)
        save(folder, whole, [full_rectangle(whole)])
        traffic = read_back(folder, whole, full_rectangle(whole))
        assert traffic.needed_bytes == whole.nbytes


def test_strided_target_is_filled_without_touching_its_gaps(tmp_path: Path) -> None:
    whole = random_tensor((6, 32), torch.float32)
    save(tmp_path, whole, split(whole, 1, [16]))
    wider = torch.zeros(6, 40, dtype=torch.float32)
    load(PieceReader(tmp_path, node="n0"), full_rectangle(whole), wider[:, :32])
    assert wider[:, :32].view(torch.int32).equal(whole.view(torch.int32))
    assert not wider[:, 32:].any()


def test_unexpected_dtype_or_header_is_rejected(tmp_path: Path) -> None:
    whole = random_tensor((8, 8), torch.float32)
    save(tmp_path, whole, [full_rectangle(whole)])
    reader = PieceReader(tmp_path, node="n0")
    message = r"__0_0.distcp.*'piece w at \[0, 0\] \[8, 8\] float64'.* 64"
    with pytest.raises(CheckpointError, match=message):
        load(reader, full_rectangle(whole), torch.zeros(8, 8, dtype=torch.float64))
    (tmp_path / "__0_0.distcp").write_bytes(bytes((tmp_path / "__0_0.distcp").stat().st_size))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp.*'piece w at"):
        read_back(tmp_path, whole, full_rectangle(whole))


def test_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    whole = random_tensor((8, 8), torch.float32)
    save(tmp_path, whole, [full_rectangle(whole)])
    os.truncate(tmp_path / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp .*100, 220 bytes"):
        read_back(tmp_path, whole, full_rectangle(whole))
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp"):
        read_back(tmp_path, whole, full_rectangle(whole))


def test_invalid_metadata_is_named(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04 nothing")
    with pytest.raises(CheckpointError, match=r"\.metadata is not readable"):
        PieceReader(tmp_path, node="n0").read_metadata()


def test_checkpoints_saved_before_the_module_moved_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = ModuleType("scheduler.worker.pieces")
    former.StoredPiece = StoredPiece  # type: ignore[attr-defined]  # made here
    whole = random_tensor((8, 8), torch.float32)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, former.__name__, former)
        patch.setattr(StoredPiece, "__module__", former.__name__)
        save(tmp_path, whole, [full_rectangle(whole)])
    assert b"scheduler.worker.pieces" in (tmp_path / ".metadata").read_bytes()
    assert read_back(tmp_path, whole, full_rectangle(whole)).needed_bytes == whole.nbytes
