"""Log files of ranks and agents: bounded without those who print being asked, and read by place.

Who prints appends through a descriptor that nobody else can change, and must never wait nor lose a line. So a file is
neither renamed nor cut: the room of its front is given back to the file system (fallocate(2), FALLOC_FL_PUNCH_HOLE),
while the file keeps its length. The place of a line is its offset, for ever; a place in the hole says how much is gone.

The end of a log, for people.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

LINE_BYTES_MAX = 16_384
_CHUNK_BYTES_MAX = 1_048_576
_BLOCK_BYTES = 512
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?=.))", re.DOTALL)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


@dataclass(frozen=True, slots=True)
class LogLimits:
    """`bytes_max` of each file are kept, and the files of the `generations` last generations of a job."""

    bytes_max: int = 67_108_864
    generations: int = 20


@dataclass(frozen=True, slots=True)
class LogLine:
    """`end` is the place behind it. `is_cut`: too long for one piece, it goes on in the next."""

    text: str
    end: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Lines from one place to another, `end`; `dropped_bytes` before them were there once."""

    lines: tuple[LogLine, ...]
    end: int
    dropped_bytes: int = 0


def trim_log(descriptor: int, bytes_max: int) -> None:
    """Where the file holds more than `bytes_max`, keep its last half of that. A pipe or a terminal holds nothing.

    Raises:
        OSError: the file system cannot do that, or the descriptor is not open for writing.
    """
    facts = os.fstat(descriptor)
    until = facts.st_size - bytes_max // 2
    until -= until % facts.st_blksize  # of a part of a block only zeros would be left, and a reader there finds no hole
    if facts.st_blocks * _BLOCK_BYTES <= bytes_max or until <= 0:
        return
    if _LIBC.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, until) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def trim_log_file(log: Path, bytes_max: int) -> None:
    """As `bound`. Raises OSError."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CLOEXEC)
    try:
        trim_log(descriptor, bytes_max)
    finally:
        os.close(descriptor)


def find_data_start(descriptor: int, offset: int) -> int:
    """Where data begins at or behind `offset`; the end of the file where none does."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as failure:
        if failure.errno != errno.ENXIO:
            raise
        return max(offset, os.fstat(descriptor).st_size)


def read_lines(log: Path, offset: int, *, lines_max: int, is_complete: bool) -> LogChunk:
    """The next lines, a part of the file at a time. A line that has not ended yet waits for its end, unless the file
    `is_over`: nobody prints there any more. A file that is not there is an empty one."""
    try:
        with log.open("rb") as file:
            kept = find_data_start(file.fileno(), offset)
            file.seek(kept)
            data = file.read(_CHUNK_BYTES_MAX)
    except FileNotFoundError:
        return LogChunk((), offset)
    if kept > offset and data:
        # The hole ends within a line: what is left of that is dropped too.
        _, newline, rest = data.partition(b"\n")
        rest = rest if newline else data
        kept += len(data) - len(rest)
        data = rest
    lines, end = _split_lines(data, kept, lines_max, is_complete=is_complete)
    return LogChunk(lines, end, kept - offset if data or kept > offset else 0)


def find_tail_offset(log: Path, lines: int, *, is_complete: bool) -> int:
    """Where the last `lines` lines begin, within the last part of the file; `is_over` as for `read_part`."""
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = find_data_start(file.fileno(), max(0, size - _CHUNK_BYTES_MAX))
            file.seek(begin)
            data = file.read(size - begin)
    except FileNotFoundError:
        return 0
    ends = [found.end() for found in _LINE.finditer(data)]
    starts = [0, *ends]
    if not is_complete or starts[-1] == len(data):
        starts = starts[:-1] or [0]  # nothing begins there, or not yet
    if begin:
        starts = starts[1:] or starts  # the first one has lost its front
    return size if lines == 0 else begin + starts[-min(lines, len(starts))]


def _split_lines(data: bytes, offset: int, lines_max: int, *, is_complete: bool) -> tuple[tuple[LogLine, ...], int]:
    found: list[LogLine] = []
    at = 0
    while len(found) < lines_max and at < len(data):
        match = _LINE.match(data, at)
        end = len(data) if match is None else match.end()
        body = data[at:end]
        if len(body) > LINE_BYTES_MAX:
            length = LINE_BYTES_MAX
            while length > LINE_BYTES_MAX - 3 and body[length] & 0xC0 == 0x80:
                length -= 1  # not within a character
            at += length
            found.append(LogLine(_decode(body[:length]), offset + at, is_cut=True))
        elif match is not None or (is_complete and len(data) < _CHUNK_BYTES_MAX):
            at = end
            found.append(LogLine(_decode(body.rstrip(b"\r\n")), offset + at))
        else:
            break
    return tuple(found), offset + at


def _decode(body: bytes) -> str:
    """Bytes that are no UTF-8 become U+FFFD."""
    return body.decode("utf-8", "replace")


_TAIL_BYTES = 4096
_TAIL_LINES = 5


def read_tail(log: Path) -> str:
    """The last lines of a log as one line for people; empty where there is nothing."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:])
