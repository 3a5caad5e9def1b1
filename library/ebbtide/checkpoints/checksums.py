"""The checksums of a checkpoint, in a file beside the files of torch.distributed.checkpoint.

A piece is one tensor shard or other value as one rank saved it. Each piece has a CRC-32 per block of 1 MiB, so that a
rank that needs a part of a large piece can verify a part of it.

The file has two lines of JSON: a header with the checksum of the second line, and the list of pieces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from ebbtide.checkpoints.errors import CheckpointError, DamagedCheckpointError

CHECKSUMS_NAME = "checksums.jsonl"
BLOCK_BYTES = 1 << 20
_FORMAT = 1


@dataclass(frozen=True)
class Piece:
    """Location and checksums of a piece.

    Attributes:
        offset: position of its first byte in `file`.
        length: size in bytes.
        data_offset: position of a tensor's row-major bytes in the piece; None for other values and unusual tensors.
        node: the node that wrote it, empty if unknown.
        checksums: CRC-32 of each block; empty if the checkpoint has no checksums.
    """

    file: str
    offset: int
    length: int
    data_offset: int | None = None
    node: str = ""
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True)
class WholeFile:
    """Size and CRC-32 of a file that is read as a whole."""

    size_bytes: int
    checksum: int


@dataclass(frozen=True)
class Checksums:
    """Content of the file of checksums.

    Attributes:
        torch_version: the version of torch that wrote the checkpoint.
        files: files that are read as a whole, by name.
        pieces: all pieces by file and offset.
    """

    torch_version: str
    files: Mapping[str, WholeFile]
    pieces: Mapping[tuple[str, int], Piece]


class BlockChecksums:
    """Running checksums of the blocks of one piece."""

    def __init__(self) -> None:
        self._complete: list[int] = []
        self._current = 0
        self._filled = 0

    def update(self, content: memoryview) -> None:
        while content:
            part = content[: BLOCK_BYTES - self._filled]
            self._current = crc32(part, self._current)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._complete.append(self._current)
                self._current = self._filled = 0
            content = content[len(part) :]

    def result(self) -> tuple[int, ...]:
        return (*self._complete, self._current) if self._filled else tuple(self._complete)


def write_checksums(directory: Path, checksums: Checksums) -> None:
    """Write the file of checksums durably."""
    document = {
        "torch": checksums.torch_version,
        "files": {name: [file.size_bytes, file.checksum] for name, file in checksums.files.items()},
        "pieces": [
            [piece.file, piece.offset, piece.length, piece.data_offset, piece.node, *piece.checksums]
            for piece in checksums.pieces.values()
        ],
    }
    body = json.dumps(document, separators=(",", ":"))
    header = json.dumps({"format": _FORMAT, "crc32": _compute_body_checksum(_FORMAT, body)})
    with (directory / CHECKSUMS_NAME).open("w", encoding="utf-8") as file:
        file.write(f"{header}\n{body}\n")
        file.flush()
        os.fsync(file.fileno())


def read_checksums(directory: Path) -> Checksums | None:
    """Return the checksums, or None if the checkpoint has none.

    Raises:
        DamagedCheckpointError: the file is not as it was written.
        CheckpointError: it has a format that this version does not read.
        OSError: it cannot be read.
    """
    path = directory / CHECKSUMS_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    version, body = _verify_body(path, content)
    if version != _FORMAT:
        raise CheckpointError(
            f"{path}: `format` is {version}, but this version of ebbtide reads {_FORMAT}. "
            "Use the version of ebbtide that saved the checkpoint, or a newer one."
        )
    document = json.loads(body)
    files = {name: WholeFile(*values) for name, values in document["files"].items()}
    return Checksums(document["torch"], files, index_pieces(map(_parse_piece, document["pieces"])))


def index_pieces(pieces: Iterable[Piece]) -> dict[tuple[str, int], Piece]:
    return {(piece.file, piece.offset): piece for piece in pieces}


def verify_whole_file(directory: Path, name: str, checksums: Checksums) -> bytes:
    """Return the content of a file that the checksums list.

    Raises:
        DamagedCheckpointError: the file is missing or differs.
        OSError: it cannot be read.
    """
    path, expected = directory / name, checksums.files[name]
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is missing.") from None
    if (len(content), crc32(content)) != (expected.size_bytes, expected.checksum):
        raise DamagedCheckpointError(f"{path} is damaged: its checksum differs from the one in {CHECKSUMS_NAME}.")
    return content


def verify_file_sizes(directory: Path, checksums: Checksums) -> None:
    """Require that every file has the size that the pieces need.

    Raises:
        DamagedCheckpointError: a file is missing or has another size.
        OSError: the directory cannot be read.
    """
    sizes: dict[str, int] = {}
    for piece in checksums.pieces.values():
        sizes[piece.file] = max(sizes.get(piece.file, 0), piece.offset + piece.length)
    for name, expected in sorted(sizes.items()):
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{directory / name} is missing.") from None
        if size != expected:
            raise DamagedCheckpointError(f"{directory / name} is damaged: it has {size} bytes instead of {expected}.")


def _verify_body(path: Path, content: bytes) -> tuple[int, str]:
    """Return the format and the second line."""
    try:
        header_line, body, rest = content.decode().split("\n")
        header: dict[str, Any] = json.loads(header_line)
        is_intact = rest == "" and header["crc32"] == _compute_body_checksum(header["format"], body)
    except (ValueError, KeyError, TypeError):
        is_intact = False
    if not is_intact:
        raise DamagedCheckpointError(f"{path} is damaged: its content does not match its own checksum.")
    return header["format"], body


def _compute_body_checksum(version: int, body: str) -> int:
    return crc32(f"{version}\n{body}".encode())


def _parse_piece(values: list[Any]) -> Piece:
    file, offset, length, data_offset, node, *checksums = values
    return Piece(file, offset, length, data_offset, node, tuple(checksums))
