"""Reader of DCP checkpoints that reads only the bytes a rank needs, and verifies their checksums."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ebbtide.checkpoints.byte_runs import compute_byte_runs, compute_span
from ebbtide.checkpoints.checkpoint_folders import METADATA_NAME
from ebbtide.checkpoints.checksums import (
    Checksums,
    Piece,
    read_checksums,
    verify_file_sizes,
    verify_whole_file,
)
from ebbtide.checkpoints.errors import CheckpointError, DamagedCheckpointError
from ebbtide.checkpoints.piece_files import PieceFile, view_tensor_bytes
from ebbtide.checkpoints.verification import BlockAssignment, PartialRead, assign_blocks
from ebbtide.rank_status import LoadTraffic

_READ_THREADS = 4


class PieceReader(FileSystemReader):
    """Reader of the pieces that one rank on `node` needs. It counts their bytes in `traffic`.

    Contiguous tensors on the host are filled in place. Other tensors are read into a buffer of the needed size first.
    Checkpoints without checksums, which other tools wrote, are read in the same way and not verified.
    """

    def __init__(self, directory: Path, *, node: str) -> None:
        super().__init__(directory)
        self._directory = directory
        self._node = node
        self._metadata: Metadata | None = None
        self._pieces: dict[MetadataIndex, Piece] = {}
        self._shapes: dict[MetadataIndex, torch.Size] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.checksums: Checksums | None = None
        self.traffic = LoadTraffic()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the verified metadata, which is read once.

        Raises:
            DamagedCheckpointError: a file is missing or damaged.
            CheckpointError: the checksums have a format that this version does not read.
        """
        if self._metadata is None:
            self.checksums = read_checksums(self._directory)
            if self.checksums is None:
                content = self._read_unverified_metadata()
            else:
                content = verify_whole_file(self._directory, METADATA_NAME, self.checksums)
                verify_file_sizes(self._directory, self.checksums)
            self._metadata = self._parse_metadata(content)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)
        tensors = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._dtypes = {name: entry.properties.dtype for name, entry in tensors.items()}
        self._shapes = {
            MetadataIndex(name, chunk.offsets): chunk.sizes for name, entry in tensors.items() for chunk in entry.chunks
        }
        self._pieces = {index: self.locate_piece(location) for index, location in self.storage_data.items()}

    def locate_piece(self, location: Any) -> Piece:
        """Return the piece at a location that the metadata names.

        Raises:
            DamagedCheckpointError: the checksums do not list it.
            CheckpointError: it is in no format of torch.
        """
        if not isinstance(location, _StorageInfo):
            raise CheckpointError(
                f"{self._directory} is not in the format of torch.distributed.checkpoint. If an earlier version of "
                "Ebbtide wrote it, resume its job to save it in this format."
            )
        if self.checksums is None:
            return Piece(location.relative_path, location.offset, location.length)
        piece = self.checksums.pieces.get((location.relative_path, location.offset))
        if piece is None or piece.length != location.length:
            raise DamagedCheckpointError(
                f"{self._directory} is damaged: no checksum for byte {location.offset} of {location.relative_path}."
            )
        return piece

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Divide the verification of pieces that several ranks read among these ranks."""
        reads = [
            self._describe_read(rank, item)
            for rank, plan in enumerate(plans)
            for item in plan.items
            if self._pieces[item.storage_index].checksums
        ]
        assignments = assign_blocks(reads, len(plans))
        return [replace(plan, storage_data=blocks) for plan, blocks in zip(plans, assignments, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan.

        Raises:
            DamagedCheckpointError: a file is missing, too short, or differs from its checksums.
        """
        transformed = [item for item in plan.items if self._is_transformed(item)]
        if transformed:
            # Extensions of torch, such as compression, know how to read their own streams.
            super().read_data(LoadPlan(transformed), planner).wait()
        items = [item for item in plan.items if not self._is_transformed(item)]
        items.sort(key=lambda item: (self._pieces[item.storage_index].file, self._pieces[item.storage_index].offset))
        assignment: BlockAssignment = plan.storage_data or {}
        verified: set[Piece] = set()
        with ThreadPoolExecutor(_READ_THREADS, "checkpoint reading") as executor:
            reads = []
            for item in items:
                piece = self._pieces[item.storage_index]
                blocks = assignment.get((piece.file, piece.offset), range(len(piece.checksums)))
                target = None if item.type == LoadItemType.BYTE_IO else planner.resolve_tensor(item).detach()
                task = executor.submit(self._read_item, item, target, () if piece in verified else blocks)
                verified.add(piece)
                reads.append((item, target, task))
            for item, target, task in reads:
                value, traffic = task.result()
                self.traffic += traffic
                if target is None:
                    planner.load_bytes(item, io.BytesIO(value))
                else:
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _is_transformed(self, item: ReadItem) -> bool:
        return bool(getattr(self.storage_data[item.storage_index], "transform_descriptors", None))

    def _read_item(self, item: ReadItem, target: Tensor | None, blocks: Collection[int]) -> tuple[bytes, LoadTraffic]:
        """Return a value that is no tensor, or fill the target; and what was read."""
        piece = self._pieces[item.storage_index]
        with PieceFile(self._directory / piece.file) as file:
            if target is None:
                value = bytearray(piece.length)
                file.read_range(piece, 0, memoryview(value), blocks, name=item.storage_index.fqn)
                content, needed = bytes(value), piece.length
            else:
                content, needed = b"", self._read_tensor(file, item, target, blocks)
            moved = 0 if piece.node == self._node else file.read_bytes
            return content, LoadTraffic(needed, file.read_bytes, moved)

    def _read_tensor(self, file: PieceFile, item: ReadItem, target: Tensor, blocks: Collection[int]) -> int:
        """Read the needed part of one tensor and return its size in bytes."""
        index = item.storage_index
        piece, shape, dtype = self._pieces[index], self._shapes[index], self._dtypes[index.fqn]
        data_offset = piece.data_offset
        if data_offset is None and not piece.checksums:
            data_offset = file.find_data(piece, dtype.itemsize)
        if data_offset is None:
            whole = _load_archive(file, piece, blocks, name=index.fqn)
            target.copy_(narrow_tensor_by_index(whole, item.storage_offsets, item.lengths))
            return target.nbytes
        is_in_place = target.device.type == "cpu" and target.is_contiguous() and target.dtype is dtype
        buffer = target if is_in_place else torch.empty(target.shape, dtype=dtype)
        content = view_tensor_bytes(buffer)
        begin, _, is_dense = compute_span(shape, item.storage_offsets, item.lengths, dtype.itemsize)
        if is_dense:
            file.read_range(piece, data_offset + begin, content, blocks, name=index.fqn)
        else:
            for runs in compute_byte_runs(shape, item.storage_offsets, item.lengths, dtype.itemsize):
                length = runs.count * runs.length
                file.read_runs(piece, data_offset, runs, content[:length])
                content = content[length:]
            file.read_range(piece, 0, content, blocks, name=index.fqn)
        if not is_in_place:
            target.copy_(buffer)
        return buffer.nbytes

    def _describe_read(self, rank: int, item: ReadItem) -> PartialRead:
        piece = self._pieces[item.storage_index]
        if item.type == LoadItemType.BYTE_IO or piece.data_offset is None:
            return PartialRead(rank, piece, 0, piece.length, is_dense=True)
        begin, end, is_dense = compute_span(
            self._shapes[item.storage_index],
            item.storage_offsets,
            item.lengths,
            self._dtypes[item.storage_index.fqn].itemsize,
        )
        return PartialRead(rank, piece, piece.data_offset + begin, piece.data_offset + end, is_dense)

    def _read_unverified_metadata(self) -> bytes:
        path = self._directory / METADATA_NAME
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path} is missing.") from None

    def _parse_metadata(self, content: bytes) -> Metadata:
        path = self._directory / METADATA_NAME
        try:
            metadata = self.unpickle(content)
        except Exception as error:  # an invalid pickle may raise any exception
            if self.checksums is None:
                raise DamagedCheckpointError(f"{path} is not readable: {error}.") from error
            raise CheckpointError(
                f"{path} was written by torch {self.checksums.torch_version} and cannot be read by torch "
                f"{torch.__version__}: {error}. Use the version of torch that saved the checkpoint, or a newer one."
            ) from error
        if not isinstance(metadata, Metadata):
            raise DamagedCheckpointError(f"{path} is not readable: it contains no metadata.")
        return metadata

    def unpickle(self, content: bytes) -> Any:
        return pickle.loads(content)


def _load_archive(file: PieceFile, piece: Piece, blocks: Collection[int], *, name: str) -> Tensor:
    """Return a whole tensor that is not stored as row-major bytes."""
    content = bytearray(piece.length)
    file.read_range(piece, 0, memoryview(content), blocks, name=name)
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    assert isinstance(tensor, Tensor)
    return tensor
