"""Stacks of a rank, read from what `faulthandler` or py-spy has written to its log."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_PYSPY_FRAME = re.compile(r"    (?P<function>\S+) \((?P<file>[^:()]+):(?P<line>\d+)\)")
_THREAD = re.compile(r"(Current thread|Thread) 0x|Thread \S+ \(")
_FRAMES_MAX = 8


def find_main_stack(log: str) -> str:
    """Return the frames of the main thread in the last dump of a log, as `file:line in function`, innermost first.

    `faulthandler` marks the thread that handles the signal as the current one: that is the main thread. Empty without a
    dump. The text comes from the rank, so it proves nothing.
    """
    threads: list[tuple[str, list[str]]] = []
    for line in log.splitlines():
        if _THREAD.match(line):
            threads.append((line, []))
        elif threads and (match := _FRAME.match(line) or _PYSPY_FRAME.match(line)):
            name = "/".join(match["file"].split("/")[-3:])
            threads[-1][1].append(f"{name}:{match['line']} in {match['function']}")
    current = [frames for header, frames in threads if header.startswith("Current") or "MainThread" in header]
    return " < ".join(_pick(current or [frames for _, frames in threads]))


def _pick(stacks: Sequence[Sequence[str]]) -> Sequence[str]:
    return stacks[-1][:_FRAMES_MAX] if stacks else ()
