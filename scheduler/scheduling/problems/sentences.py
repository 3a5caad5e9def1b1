"""Figures and lists in the sentences of problems."""

from __future__ import annotations

from collections.abc import Mapping


def describe_gpu_hours(gpu_s: float) -> str:
    return f"{gpu_s / 3600.0:,.1f} GPU-hours"


def describe_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def describe_gpus(count: int, state: str) -> str:
    """Return `1 GPU is lent` or `2 GPUs are lent`."""
    return f"{describe_count(count, 'GPU')} {'is' if count == 1 else 'are'} {state}"


def join_counts(counts: Mapping[str, int]) -> str:
    """Return `3 preemptions and 2 resizes`, without counts of 0. `counts` is by singular noun."""
    parts = [describe_count(count, noun) for noun, count in counts.items() if count]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def shorten(text: str, length_max: int) -> str:
    """Return the first line of a text without its full stop, at most so long."""
    line = next(iter(text.strip().splitlines()), "").rstrip(". ")
    return line if len(line) <= length_max else f"{line[: length_max - 2].rstrip()} …"
