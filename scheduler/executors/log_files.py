"""Log files of ranks and agents: bounded in size without the writer's help, and read by offset.

Writers append through their own descriptors and must neither block nor lose lines. So files are neither renamed nor
truncated: their front is released with fallocate(2) FALLOC_FL_PUNCH_HOLE, and their length stays. A line's offset never
changes, and an offset inside the hole shows how much was dropped.
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
    """Keep the last `bytes_max` of each file, and the files of the last `generations` of a job."""

    bytes_max: int = 67_108_864
    generations: int = 20


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line. `end` is the offset after it. `is_cut`: the line was too long and continues in the next one."""

    text: str
    end: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Lines up to the offset `end`, after `dropped_bytes` that no longer exist."""

    lines: tuple[LogLine, ...]
    end: int
    dropped_bytes: int = 0


def trim_log(descriptor: int, bytes_max: int) -> None:
    """Drop the front of a file larger than `bytes_max`, keeping half of that. Pipes and terminals are ignored.

    Raises:
        OSError: the file system does not support it, or the descriptor is not writable.
    """
    stat = os.fstat(descriptor)
    hole_end = stat.st_size - bytes_max // 2
    hole_end -= hole_end % stat.st_blksize  # a partly punched block is zeroed, and readers would not find a hole there
    if stat.st_blocks * _BLOCK_BYTES <= bytes_max or hole_end <= 0:
        return
    if _LIBC.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, hole_end) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def trim_log_file(log: Path, bytes_max: int) -> None:
    """Trim a file by path. Raises OSError."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CLOEXEC)
    try:
        trim_log(descriptor, bytes_max)
    finally:
        os.close(descriptor)


def find_data_start(descriptor: int, offset: int) -> int:
    """Return the first offset with data at or after `offset`, or the end of the file."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return max(offset, os.fstat(descriptor).st_size)


def read_lines(log: Path, offset: int, *, lines_max: int, is_complete: bool) -> LogChunk:
    """Return the next lines. An unfinished line is withheld unless the file `is_complete`. A missing file is empty."""
    try:
        with log.open("rb") as file:
            data_start = find_data_start(file.fileno(), offset)
            file.seek(data_start)
            data = file.read(_CHUNK_BYTES_MAX)
    except FileNotFoundError:
        return LogChunk((), offset)
    if data_start > offset and data:
        # The hole ends inside a line. Drop the rest of that line.
        _, newline, rest = data.partition(b"\n")
        rest = rest if newline else data
        data_start += len(data) - len(rest)
        data = rest
    lines, end = _split_lines(data, data_start, lines_max, is_complete=is_complete)
    return LogChunk(lines, end, data_start - offset if data or data_start > offset else 0)


def find_tail_offset(log: Path, lines: int, *, is_complete: bool) -> int:
    """Return the offset of the last `lines` lines, searching the last chunk of the file."""
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = find_data_start(file.fileno(), max(0, size - _CHUNK_BYTES_MAX))
            file.seek(begin)
            data = file.read(size - begin)
    except FileNotFoundError:
        return 0
    ends = [match.end() for match in _LINE.finditer(data)]
    starts = [0, *ends]
    if not is_complete or starts[-1] == len(data):
        starts = starts[:-1] or [0]  # nothing starts there, or not yet
    if begin:
        starts = starts[1:] or starts  # the first line is incomplete
    return size if lines == 0 else begin + starts[-min(lines, len(starts))]


def _split_lines(data: bytes, offset: int, lines_max: int, *, is_complete: bool) -> tuple[tuple[LogLine, ...], int]:
    lines: list[LogLine] = []
    position = 0
    while len(lines) < lines_max and position < len(data):
        match = _LINE.match(data, position)
        end = len(data) if match is None else match.end()
        body = data[position:end]
        if len(body) > LINE_BYTES_MAX:
            length = LINE_BYTES_MAX
            while length > LINE_BYTES_MAX - 3 and body[length] & 0xC0 == 0x80:
                length -= 1  # do not split a character
            position += length
            lines.append(LogLine(_decode(body[:length]), offset + position, is_cut=True))
        elif match is not None or (is_complete and len(data) < _CHUNK_BYTES_MAX):
            position = end
            lines.append(LogLine(_decode(body.rstrip(b"\r\n")), offset + position))
        else:
            break
    return tuple(lines), offset + position


def _decode(body: bytes) -> str:
    return body.decode("utf-8", "replace")


_TAIL_BYTES = 4096
_TAIL_LINES = 5


def read_tail(log: Path) -> str:
    """Return the last lines joined into one, or an empty string."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:])
