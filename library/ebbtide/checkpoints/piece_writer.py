"""Writer of standard DCP files that computes a checksum of every block while it writes."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future as Task
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ebbtide.checkpoints.checkpoint_folders import METADATA_NAME
from ebbtide.checkpoints.checksums import BlockChecksums, Checksums, Piece, WholeFile, index_pieces, write_checksums

_OVERLAPPED_BYTES = 1 << 18  # smaller writes take less time than handing them to a thread


@dataclass(frozen=True)
class _WrittenPiece:
    """A piece as its rank reports it to rank 0, which splits it into torch's record and the checksums."""

    location: _StorageInfo
    piece: Piece


class PieceWriter(FileSystemWriter):
    """Writer of the pieces of one rank, and on rank 0 of the metadata and checksums of all ranks."""

    def __init__(self, directory: Path, *, node: str) -> None:
        super().__init__(directory)
        self._directory = directory
        self._node = node

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        with (
            (self._directory / name).open("wb") as file,
            ThreadPoolExecutor(1, "checkpoint checksums") as executor,
            ThreadPoolExecutor(1, "checkpoint copies") as copier,
            _without_archive_checksums(),
        ):
            resolved = _resolve_ahead(plan.items, planner, copier)
            results = [self._write_piece(file, name, item, data, executor) for item, data in resolved]
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        standard = [[replace(each, storage_data=each.storage_data.location) for each in rank] for rank in results]
        super().finish(metadata, standard)
        content = (self._directory / METADATA_NAME).read_bytes()
        files = {METADATA_NAME: WholeFile(len(content), crc32(content))}
        pieces = index_pieces(each.storage_data.piece for rank in results for each in rank)
        write_checksums(self._directory, Checksums(str(torch.__version__), files, pieces))

    def _write_piece(
        self, file: BinaryIO, name: str, item: WriteItem, data: Tensor | io.BytesIO, executor: ThreadPoolExecutor
    ) -> WriteResult:
        offset, stream = file.tell(), _PieceStream(file, executor)
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
            data_offset = None
        else:
            _save_tensor(data, stream)
            data_offset = stream.find_data(data)
        length = stream.length
        piece = Piece(name, offset, length, data_offset, self._node, stream.checksums.result())
        return WriteResult(item.index, length, _WrittenPiece(_StorageInfo(name, offset, length), piece))


def _resolve_ahead(
    items: Sequence[WriteItem], planner: SavePlanner, copier: ThreadPoolExecutor
) -> Iterator[tuple[WriteItem, Tensor | io.BytesIO]]:
    """Yield each item with its data on the host. The next tensor leaves its GPU while the caller writes this one."""
    pending: deque[tuple[WriteItem, Tensor | io.BytesIO | Task[Tensor]]] = deque()
    is_synchronized = False
    for item in items:
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            pending.append((item, data))
        elif data.is_cuda:
            if not is_synchronized:
                # The thread has a stream of its own, which does not wait for the kernels that compute the tensor.
                torch.cuda.synchronize(data.device)
                is_synchronized = True
            pending.append((item, copier.submit(_prepare_tensor, data)))
        else:
            pending.append((item, _prepare_tensor(data)))
        if len(pending) > 1:
            yield _await_copy(*pending.popleft())
    if pending:
        yield _await_copy(*pending.popleft())


def _await_copy(item: WriteItem, data: Tensor | io.BytesIO | Task[Tensor]) -> tuple[WriteItem, Tensor | io.BytesIO]:
    return item, data.result() if isinstance(data, Task) else data


@contextmanager
def _without_archive_checksums() -> Iterator[None]:
    """Let torch.save leave out the checksums of its archives.

    torch computes them before it writes, which takes about as long as the write. torch.load does not read them, and the
    blocks of each piece have checksums of their own.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _save_tensor(tensor: Tensor, stream: _PieceStream) -> None:
    """Write the tensor as torch.save does. An error of the disk is raised instead of the one of torch that hides it.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        torch.save(tensor, stream)  # type: ignore[arg-type]
    except RuntimeError:
        if stream.error is not None:
            raise stream.error from None
        raise


def _prepare_tensor(data: Tensor) -> Tensor:
    """Return the tensor on the host, contiguous and without other content in its storage, which torch would save."""
    tensor = data.detach().cpu().contiguous()
    if type(tensor) is Tensor and tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor.clone()
    return tensor


class _PieceStream:
    """A file to which torch.save writes one piece, with checksums of its blocks.

    torch.save writes a zip archive without compression. The content of a tensor is the entry `data/0`: after a local
    header, the name and the padding (the `extra` field), it is written at once.
    """

    def __init__(self, file: BinaryIO, executor: ThreadPoolExecutor) -> None:
        self._file = file
        self._executor = executor
        self._writes_since_name: int | None = None
        self._data: tuple[int, int] | None = None
        self.length = 0
        self.checksums = BlockChecksums()
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._note_data(view)
        if len(view) < _OVERLAPPED_BYTES:
            self.checksums.update(view)
            self._write_file(view)
        else:
            # Both release the interpreter, so that the checksum costs no time where a core is free.
            checksum = self._executor.submit(self.checksums.update, view)
            self._write_file(view)
            checksum.result()
        self.length += len(view)
        return len(view)

    def _write_file(self, view: memoryview) -> None:
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Nothing to flush: the file is flushed when all pieces are written."""

    def find_data(self, tensor: Tensor) -> int | None:
        """Return where the tensor's row-major bytes begin in the piece, or None if they are not stored so."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        if tensor.is_conj() or tensor.is_neg() or self._data is None or self._data[1] != tensor.nbytes:
            return None
        return self._data[0]

    def _note_data(self, view: memoryview) -> None:
        if self._writes_since_name is not None:
            self._writes_since_name += 1
            if self._writes_since_name == 2:
                self._data, self._writes_since_name = (self.length, len(view)), None
        elif self._data is None and len(view) < 64 and bytes(view).endswith(b"/data/0"):
            self._writes_since_name = 0
