"""Trimming log files while they are written and read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.executors.log_files import (
    LINE_BYTES_MAX,
    LogChunk,
    find_tail_offset,
    read_lines,
    trim_log,
    trim_log_file,
)

BYTES_MAX = 65_536
Steps = list[tuple[str, int]]
_STEP = st.one_of(
    st.tuples(st.just("print"), st.integers(1, 400)),
    st.tuples(st.just("bound"), st.just(0)),
    st.tuples(st.just("read"), st.integers(1, 300)),
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


def read_all(log: Path, offset: int = 0, *, is_over: bool = True) -> Iterator[LogChunk]:
    while (part := read_lines(log, offset, lines_max=1000, is_complete=is_over)).lines or part.dropped_bytes:
        yield part
        offset = part.end


def texts(log: Path, offset: int = 0, *, is_over: bool = True) -> list[str]:
    return [line.text for part in read_all(log, offset, is_over=is_over) for line in part.lines]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_STEP, min_size=1, max_size=60))
def test_reader_sees_all_lines_except_reported_gaps(tmp_path: Path, steps: Steps) -> None:
    log = tmp_path / "rank.log"
    log.unlink(missing_ok=True)
    ends: dict[int, str] = {}  # text of each line by its end offset
    size = offset = dropped = reported = 0
    with log.open("ab", buffering=0) as printer:
        for what, count in [*steps, ("bound", 0), ("read", 10**6)]:
            for number in range(len(ends), len(ends) + count) if what == "print" else ():
                text = f"line {number} " + "x" * (number % 700)
                size += printer.write(text.encode() + b"\n")
                ends[size] = text
            if what == "bound":
                trim_log_file(log, BYTES_MAX)
                assert log.stat().st_blocks * 512 <= BYTES_MAX + 8192
                assert log.stat().st_size == size, "offsets are stable"
            while what == "read" and count > 0:
                part = read_lines(log, offset, lines_max=count, is_complete=False)
                if not (part.lines or part.dropped_bytes):
                    break
                for line in part.lines:
                    assert ends[line.end] == line.text
                    reported += len(line.text) + 1
                dropped, offset, count = dropped + part.dropped_bytes, part.end, count - len(part.lines)
    assert (offset, reported + dropped) == (size, size)


def test_reader_resumes_at_a_complete_line_after_trimming(log: Path) -> None:
    lines = [f"line {number} " + "x" * (number % 700) for number in range(400)]
    log.write_text("".join(f"{line}\n" for line in lines))
    trim_log_file(log, BYTES_MAX)
    begins = 0
    for line in lines:
        first = read_lines(log, begins, lines_max=1, is_complete=False).lines[0].text
        assert first in lines
        begins += len(line) + 1


def test_invalid_utf8_and_endless_lines(log: Path) -> None:
    log.write_bytes(b"\xff\xfe caf\xc3\xa9\n10%\r20%\r\n\nlong " + "é".encode() * 20_000 + b"\nlast")
    first, tenth, twentieth, blank, *pieces, last = texts(log)
    assert [first, tenth, twentieth, blank, last] == ["\ufffd\ufffd café", "10%", "20%", "", "last"]
    assert "".join(pieces) == "long " + "é" * 20_000, "it is cut between two characters"
    assert all(len(piece.encode()) <= LINE_BYTES_MAX for piece in pieces)
    assert texts(log, is_over=False)[-1] == pieces[-1], "an unfinished line is withheld"
    assert texts(log.with_name("nothing.log")) == []


@pytest.mark.parametrize("is_over", [True, False])
def test_tail_offset(log: Path, *, is_over: bool) -> None:
    log.write_text("".join(f"{number}\n" for number in range(200_000)) + "part")
    lines = [*(str(number) for number in range(200_000)), *(["part"] if is_over else [])]
    for count in (0, 1, 2, 1000):
        begin = find_tail_offset(log, count, is_complete=is_over)
        assert texts(log, begin, is_over=is_over) == (lines[-count:] if count else [])
    assert find_tail_offset(log.with_name("nothing.log"), 5, is_complete=is_over) == 0


def test_pipe_is_not_trimmed() -> None:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"x" * 1000)
    trim_log(write_fd, 10)
    for descriptor in (read_fd, write_fd):
        os.close(descriptor)
