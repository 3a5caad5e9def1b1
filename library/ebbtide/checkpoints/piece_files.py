"""Reading of the pieces in one file, with verification of their blocks."""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ebbtide.checkpoints.archive_layout import find_row_major_data
from ebbtide.checkpoints.byte_runs import ByteRuns
from ebbtide.checkpoints.checksums import (
    BLOCK_BYTES,
    Checksums,
    Piece,
    read_checksums,
    verify_file_sizes,
    verify_whole_file,
)
from ebbtide.checkpoints.errors import DamagedCheckpointError


def view_tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host as bytes. The tensor must outlive the view."""
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class PieceFile:
    """A file of pieces that is open for reading and counts the bytes read from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self.read_bytes = 0

    def __enter__(self) -> PieceFile:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self._path} is missing.") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read_range(self, piece: Piece, begin: int, target: memoryview, verified: Collection[int], *, name: str) -> None:
        """Fill `target` from byte `begin` of the piece, and verify some blocks, which are read as a whole.

        Args:
            verified: numbers of the blocks to verify, which may lie outside the range.
            name: name of the tensor, for errors.

        Raises:
            DamagedCheckpointError: a checksum differs, or the file is too short.
        """
        end, filled = begin + len(target), begin
        for block in sorted(verified):
            first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, piece.length)
            if filled < min(first, end):
                # Blocks before this one that another rank verifies.
                self.read_into(target[filled - begin : min(first, end) - begin], piece.offset + filled)
            inside_first, inside_last = max(first, begin), min(last, end)
            if inside_first < inside_last:
                inside = target[inside_first - begin : inside_last - begin]
            else:
                inside, inside_first, inside_last = target[:0], first, first
            checksum = self._read_scratch(piece, first, inside_first)
            self.read_into(inside, piece.offset + inside_first)
            checksum = self._read_scratch(piece, inside_last, last, crc32(inside, checksum))
            filled = max(filled, min(last, end))
            if checksum != piece.checksums[block]:
                raise DamagedCheckpointError(
                    f"{self._path} is damaged: the checksum of {name} differs in block {block} of the piece "
                    f"at byte {piece.offset}."
                )
        if filled < end:
            self.read_into(target[filled - begin :], piece.offset + filled)

    def read_runs(self, piece: Piece, data_offset: int, runs: ByteRuns, target: memoryview) -> None:
        """Fill `target` with runs of the tensor's bytes, which begin at `data_offset` of the piece."""
        begin = piece.offset + data_offset + runs.begin
        if runs.is_sieved:
            span = torch.empty(runs.span, dtype=torch.uint8)
            self.read_into(view_tensor_bytes(span), begin)
            rows = torch.frombuffer(target, dtype=torch.uint8).view(runs.count, runs.length)
            rows.copy_(span.as_strided((runs.count, runs.length), (runs.stride, 1)))
            return
        for number in range(runs.count):
            at = number * runs.length
            self.read_into(target[at : at + runs.length], begin + number * runs.stride)

    def read_into(self, target: memoryview, offset: int) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], offset)
            if count == 0:
                raise DamagedCheckpointError(f"{self._path} ends at byte {offset}, {len(target)} bytes too early.")
            self.read_bytes += count
            target, offset = target[count:], offset + count

    def find_data(self, piece: Piece, item_bytes: int) -> int | None:
        """Return where a tensor's row-major bytes begin in a piece without a recorded position, or None."""
        with io.BufferedReader(_PieceSlice(self, piece), buffer_size=1024) as archive:
            return find_row_major_data(archive, item_bytes)

    def _read_scratch(self, piece: Piece, begin: int, end: int, checksum: int = 0) -> int:
        """Read bytes into a buffer that is dropped, and return the running checksum after them."""
        if begin >= end:
            return checksum
        scratch = bytearray(end - begin)
        self.read_into(memoryview(scratch), piece.offset + begin)
        return crc32(scratch, checksum)


class _PieceSlice(io.RawIOBase):
    """One piece as a file of its own."""

    def __init__(self, file: PieceFile, piece: Piece) -> None:
        self._file = file
        self._piece = piece
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._piece.length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")[: max(0, self._piece.length - self._position)]
        self._file.read_into(view, self._piece.offset + self._position)
        self._position += len(view)
        return len(view)


def verify_checkpoint(directory: Path) -> Checksums | None:
    """Read all files of a checkpoint and return its checksums, or None if it has none.

    Raises:
        DamagedCheckpointError: a file is missing or differs from its checksums.
        CheckpointError: the checksums have a format that this version does not read.
        OSError: a file cannot be read.
    """
    checksums = read_checksums(directory)
    if checksums is None:
        return None
    for name in checksums.files:
        verify_whole_file(directory, name, checksums)
    verify_file_sizes(directory, checksums)
    for piece in checksums.pieces.values():
        with PieceFile(directory / piece.file) as file:
            file.read_range(piece, 0, memoryview(b""), range(len(piece.checksums)), name="the content")
    return checksums
