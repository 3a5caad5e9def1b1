"""Reading of the trainer's checkpoints: standard DCP files, and the trainer's own layout of earlier versions.

Until format 3 of the manifest, a piece was a header that named it, padded to 64 bytes, and its row-major bytes. The
metadata locates it by a `StoredPiece`, and there are no checksums.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from ebbtide.checkpoints.checksums import Piece
from ebbtide.checkpoints.piece_reader import PieceReader

# Checkpoints are pickled with the module name of `StoredPiece`. The oldest have this name.
_FORMER_MODULE = "scheduler.worker.pieces"


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Location of a piece in a checkpoint of format 3 or older.

    Attributes:
        offset: position in `file` of its first byte, behind the header.
        length: in bytes, without padding.
        node: the node on which it was written.
    """

    file: str
    offset: int
    length: int
    node: str


class CheckpointReader(PieceReader):
    """Reader of checkpoints of all formats."""

    def locate_piece(self, location: Any) -> Piece:
        if isinstance(location, StoredPiece):
            return Piece(location.file, location.offset, location.length, data_offset=0, node=location.node)
        return super().locate_piece(location)

    def unpickle(self, content: bytes) -> Any:
        return _MetadataUnpickler(io.BytesIO(content)).load()


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that finds `StoredPiece` in checkpoints that were saved when it was in another module."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(__name__ if module == _FORMER_MODULE else module, name)
