"""Which rank verifies which blocks of a checkpoint, so that all are verified and none is read needlessly often."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from ebbtide.checkpoints.checksums import BLOCK_BYTES, Piece


@dataclass(frozen=True)
class PartialRead:
    """A rank's read of a part of a piece: bytes `begin` to `end` of the piece, without gaps if `is_dense`."""

    rank: int
    piece: Piece
    begin: int
    end: int
    is_dense: bool


BlockAssignment = dict[tuple[str, int], tuple[int, ...]]
"""Blocks that one rank verifies, by file and offset of their piece. A piece that is absent is verified as a whole."""


def assign_blocks(reads: Sequence[PartialRead], ranks: int) -> list[BlockAssignment]:
    """Return the blocks that each rank verifies, of the pieces that several ranks read.

    A block is verified by a rank that reads all of it, otherwise by one that reads a part of it; ranks take turns.
    """
    by_piece: defaultdict[tuple[str, int], list[PartialRead]] = defaultdict(list)
    for read in reads:
        by_piece[read.piece.file, read.piece.offset].append(read)
    assignments: list[BlockAssignment] = [{} for _ in range(ranks)]
    for key, readers in by_piece.items():
        if len({read.rank for read in readers}) < 2:
            continue
        blocks: dict[int, list[int]] = {read.rank: [] for read in readers}
        turn = crc32(repr(key).encode())
        for block in range(len(readers[0].piece.checksums)):
            candidates = _find_candidates(readers, block)
            blocks[candidates[(turn + block) % len(candidates)].rank].append(block)
        for rank, numbers in blocks.items():
            assignments[rank][key] = tuple(numbers)
    return assignments


def _find_candidates(readers: Sequence[PartialRead], block: int) -> Sequence[PartialRead]:
    piece = readers[0].piece
    # The archive's own bytes before and after the data belong to the first and the last reader of the data.
    first = max(block * BLOCK_BYTES, piece.data_offset or 0)
    last = min((block + 1) * BLOCK_BYTES, piece.length)
    data_end = max(read.end for read in readers)
    whole = [read for read in readers if read.is_dense and read.begin <= first and read.end >= min(last, data_end)]
    touching = [read for read in readers if read.begin < last and read.end > first]
    return whole or touching or readers
