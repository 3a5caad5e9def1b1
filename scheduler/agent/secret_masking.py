"""Masking of secret values in the output of ranks, before it leaves the machine.

A masked byte becomes `*`, so that positions in a log stay what they are. Values are also found in base64, URL encoding
and JSON strings, and line by line. Pure, except for `scrub_file`.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, quote_plus

from scheduler.agent.shared_files import open_regular_file

_PATTERN_BYTES_MIN = 6
_LINE_BYTES_MIN = 8
_BLOCK_BYTES = 1 << 20
_NOT_A_LINE_END = re.compile(rb"[^\r\n]")


@dataclass(frozen=True, slots=True)
class SecretMask:
    """Masks a set of values. Without `patterns`, the values are unknown, and everything is masked."""

    patterns: tuple[bytes, ...]

    @classmethod
    def of(cls, values: Iterable[bytes]) -> SecretMask:
        patterns = {pattern for value in values for pattern in _list_patterns(value)}
        return cls(tuple(sorted(patterns, key=len, reverse=True)))

    @property
    def longest(self) -> int:
        """Size of the longest pattern, in bytes."""
        return len(self.patterns[0]) if self.patterns else 0

    def mask(self, data: bytes) -> bytes:
        """Return data of the same size with each occurrence of a value replaced."""
        if not self.patterns:
            return _NOT_A_LINE_END.sub(b"*", data)
        masked = bytearray(data)
        for at, size in self.find_values(data):
            masked[at : at + size] = b"*" * size
        return bytes(masked)

    def find_values(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield the position and the size of each occurrence of a value. They may overlap."""
        for pattern in self.patterns:
            at = data.find(pattern)
            while at >= 0:
                yield at, len(pattern)
                at = data.find(pattern, at + 1)

    def count_open_bytes(self, data: bytes) -> int:
        """Return the size of the longest end of `data` that may be the beginning of a value."""
        longest = min(self.longest - 1, len(data))
        for size in range(longest, 0, -1):
            end = data[-size:]
            if any(len(pattern) > size and pattern.startswith(end) for pattern in self.patterns):
                return size
        return 0


def mask_chunk(mask: SecretMask | None, before: bytes, data: bytes, *, size_max: int, may_grow: bool) -> bytes:
    """Return the masked beginning of `data`.

    Args:
        before: bytes of the log in front of `data`, in which a value may have begun.
        size_max: most bytes to return. `data` may be longer, so that values which end later are found.
        may_grow: whether the log may continue after `data`. What may be the beginning of a value is then held back.
    """
    if mask is None:
        return data[:size_max]
    masked = mask.mask(before + data)[len(before) :]
    held_back = mask.count_open_bytes(data) if may_grow else 0
    return masked[: min(size_max, len(data) - held_back)]


def scrub_file(path: Path, mask: SecretMask) -> None:
    """Mask the values in a file in place. A missing file, a link and a special file are left alone.

    Raises:
        OSError: the file cannot be written.
    """
    if not mask.patterns:
        return
    try:
        descriptor = open_regular_file(path)
    except ValueError:
        return
    if descriptor is None:
        return
    try:
        # The path may name another file by now, so that the file is opened again by its descriptor.
        writer = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            for at, block in _read_blocks(descriptor, overlap=mask.longest - 1):
                for offset, size in mask.find_values(block):
                    os.pwrite(writer, b"*" * size, at + offset)
        finally:
            os.close(writer)
    finally:
        os.close(descriptor)


def _read_blocks(descriptor: int, *, overlap: int) -> Iterator[tuple[int, bytes]]:
    """Yield the file in blocks with their positions. Each contains the last bytes of the one before, as read first."""
    at, before = 0, b""
    while block := os.pread(descriptor, _BLOCK_BYTES, at):
        yield at - len(before), before + block
        at += len(block)
        before = (before + block)[-overlap:] if overlap else b""


def _list_patterns(value: bytes) -> Iterator[bytes]:
    """Yield the forms in which a value may be printed."""
    forms = [value, value.strip(), quote(value, safe="").encode(), quote_plus(value).encode()]
    forms += [json.dumps(value.decode("utf-8", "replace"))[1:-1].encode()]
    yield from (form for form in forms if len(form) >= _PATTERN_BYTES_MIN)
    yield from (line.strip() for line in value.splitlines() if len(line.strip()) >= _LINE_BYTES_MIN)
    yield from (form for form in _list_base64_forms(value.strip()) if len(form) >= _LINE_BYTES_MIN)


def _list_base64_forms(value: bytes) -> Iterator[bytes]:
    """Yield the characters in base64 that the value alone determines, for its three positions in a group of bytes."""
    for offset, first in ((0, 0), (1, 2), (2, 3)):
        padded = b"\0" * offset + value
        last = len(padded) * 8 // 6
        for encode in (base64.standard_b64encode, base64.urlsafe_b64encode):
            yield encode(padded)[first:last]
