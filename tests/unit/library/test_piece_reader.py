"""Storage of checkpoints: any part of a stored tensor can be read, and no more is read than it needs."""

from __future__ import annotations

import os
import random
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

from ebbtide.checkpoints.byte_runs import ByteRuns, compute_byte_runs, compute_span
from ebbtide.checkpoints.checksums import BLOCK_BYTES
from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.checkpoints.piece_reader import PieceReader
from ebbtide.checkpoints.piece_writer import PieceWriter
from ebbtide.rank_status import LoadTraffic

ARCHIVE_BYTES = 8000
"""More than torch.save writes around the content of a tensor, and than a reader reads to find it."""
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
        writer: StorageWriter = FileSystemWriter(folder) if by_torch else PieceWriter(folder, node=f"n{rank}")
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
        assert read_back(torch_folder, whole, wanted).needed_bytes == traffic.needed_bytes
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


@given(st.data())
def test_span_of_a_part_is_from_its_first_to_its_last_byte(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [data.draw(st.integers(0, length - 1)) for length in shape]
    lengths = [data.draw(st.integers(1, length - begin)) for length, begin in zip(shape, offsets, strict=True)]
    elements = torch.arange(prod(shape)).view(shape)
    part = Rectangle(tuple(offsets), tuple(lengths)).select(elements).flatten().tolist()
    is_dense = part == list(range(part[0], part[-1] + 1))
    assert compute_span(shape, offsets, lengths, 2) == (2 * part[0], 2 * part[-1] + 2, is_dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_read_in_one_run(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = random_tensor((1000, 30), dtype)
    save(tmp_path, whole, [full_rectangle(whole)], by_torch=True)
    wanted = Rectangle((37, 0), (26, 30))
    assert list(compute_byte_runs(whole.shape, wanted.offsets, wanted.lengths, 1)) == [ByteRuns(1110, 1, 780, 780)]
    traffic, needed = read_back(tmp_path, whole, wanted), 26 * 30 * whole.itemsize
    assert traffic.needed_bytes == needed
    assert traffic.read_bytes < needed + ARCHIVE_BYTES


@pytest.mark.parametrize(("columns", "part", "read_columns"), [(640, 320, 320), (200, 190, 200)])
def test_wide_columns_are_read_without_their_gaps(tmp_path: Path, columns: int, part: int, read_columns: int) -> None:
    whole = random_tensor((500, columns), torch.float32)
    save(tmp_path, whole, [full_rectangle(whole)], by_torch=True)
    traffic = read_back(tmp_path, whole, Rectangle((0, 0), (500, part)))
    assert traffic.needed_bytes == 500 * part * 4
    assert 500 * read_columns * 4 - 4 * columns <= traffic.read_bytes < 500 * read_columns * 4 + ARCHIVE_BYTES


def test_only_needed_pieces_are_read_and_bytes_of_other_nodes_are_counted(tmp_path: Path) -> None:
    whole = random_tensor((11, 4000), torch.float64)
    save(tmp_path, whole, split(whole, 0, [4, 8]))
    row = 4000 * 8
    # The pieces with rows 0 to 3 and 4 to 7 are verified as a whole.
    for node, moved_rows in (("n0", 4), ("n1", 4), ("n7", 8)):
        traffic = read_back(tmp_path, whole, Rectangle((3, 0), (4, 4000)), node=node)
        assert traffic.needed_bytes == 4 * row
        assert 8 * row <= traffic.read_bytes < 8 * row + 2 * ARCHIVE_BYTES
        assert moved_rows * row <= traffic.moved_bytes < moved_rows * row + 2 * ARCHIVE_BYTES


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_piece_share_its_verification(tmp_path: Path, axis: int, ranks: int) -> None:
    whole = random_tensor((1536, 1024), torch.float32)
    save(tmp_path, whole, [full_rectangle(whole)])
    parts = split(whole, axis, [whole.shape[axis] // ranks * k for k in range(1, ranks)])
    reads = _read_together(tmp_path, whole, parts)
    assert sum(read.needed_bytes for read in reads) == whole.nbytes
    # A block of rows is in the part of one rank, a block of columns in all parts.
    extra = whole.nbytes + ARCHIVE_BYTES if axis else ranks * BLOCK_BYTES
    assert sum(read.read_bytes for read in reads) <= whole.nbytes + extra
    assert max(read.read_bytes for read in reads) <= 2.2 * whole.nbytes / ranks + BLOCK_BYTES


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_damage_is_noticed_by_one_of_the_ranks_that_share_a_piece(tmp_path: Path, axis: int, seed: int) -> None:
    whole = random_tensor((1536, 1024), torch.float32)
    save(tmp_path, whole, [full_rectangle(whole)])
    file, generator = tmp_path / "__0_0.distcp", random.Random(seed)
    content = bytearray(file.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is damaged.* w "):
        _read_together(tmp_path, whole, split(whole, axis, [whole.shape[axis] // 3]))


def _read_together(folder: Path, whole: Tensor, parts: Sequence[Rectangle]) -> list[LoadTraffic]:
    """Read one part per rank, as the ranks of a group do."""
    readers = [PieceReader(folder, node="n0") for _ in parts]
    plans = []
    for reader, part in zip(readers, parts, strict=True):
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        entry = metadata.state_dict_metadata["w"]
        assert isinstance(entry, TensorStorageMetadata)
        plans.append(LoadPlan(create_read_items_for_chunk_list("w", entry, [part.chunk])))
    plans = readers[0].prepare_global_plan(plans)
    for reader, plan, part in zip(readers, plans, parts, strict=True):
        target = torch.zeros(part.lengths, dtype=whole.dtype)
        reader.read_data(plan, SingleTensorLoadPlanner(target)).wait()
        assert target.view(torch.int32).equal(part.select(whole).contiguous().view(torch.int32))
    return [reader.traffic for reader in readers]


@pytest.mark.parametrize("by_torch", [False, True])
def test_unusual_layouts_are_read_as_torch_reads_them(tmp_path: Path, by_torch: bool) -> None:
    whole = random_tensor((6, 4), torch.float32).t()
    save(tmp_path, whole, [full_rectangle(whole)], by_torch=by_torch)
    read_back(tmp_path, whole, Rectangle((1, 2), (2, 3)))


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


def test_other_dtype_is_converted(tmp_path: Path) -> None:
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    save(tmp_path, whole, [full_rectangle(whole)])
    target = load(PieceReader(tmp_path, node="n0"), full_rectangle(whole), torch.zeros(8, 8, dtype=torch.float64))
    assert target.equal(whole.double())


def test_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    whole = random_tensor((8, 8), torch.float32)
    save(tmp_path, whole, [full_rectangle(whole)])
    os.truncate(tmp_path / "__0_0.distcp", 100)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is damaged: it has 100 bytes"):
        read_back(tmp_path, whole, full_rectangle(whole))
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is missing"):
        read_back(tmp_path, whole, full_rectangle(whole))


def test_invalid_metadata_is_named(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04 nothing")
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is not readable"):
        PieceReader(tmp_path, node="n0").read_metadata()
