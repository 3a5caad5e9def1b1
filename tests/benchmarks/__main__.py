"""`python -m tests.benchmarks [name ...]`: prints the machine, then each measurement with its target."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

Row = tuple[str, str, str]

NAMES = (
    *("solver", "curve", "galvatron", "referee", "speedup", "accuracy", "folds", "learning", "closed_loop"),
    *("lengths", "lengths_trainer", "freezing", "forecast", "lending_share", "lending_decision"),
    *("serving_capacity", "demand_requests"),
    *("simulate", "decide", "optimum", "reproduce", "reproduce_deadlines", "rubick", "tenfold"),
    *("resharding", "shrinks", "replan", "agents", "machine_agents", "kubernetes", "front_door", "streams", "takeover"),
    *("metrics", "console", "open_tab", "ended_jobs", "redaction", "session_overhead", "checkpoints"),
)


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in NAMES]:
        print(f"benchmark: {unknown[0]!r} is not known; allowed: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    console = Console()
    console.print(f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}", highlight=False)
    table = Table("benchmark", "what", "bar", "measured")
    for name in names or NAMES:
        with console.status(name):
            for what, bar, measured in rows(name):
                table.add_row(name, what, bar, measured)
    console.print(table)
    return 0


def rows(name: str) -> Iterator[Row]:
    """Return the rows of one benchmark module. A missing module or missing data becomes a row that says so."""
    if not (Path(__file__).parent / f"{name}.py").exists():
        yield (name, "", "not measured: there is no such module yet")
        return
    try:
        yield from import_module(f"tests.benchmarks.{name}").rows()
    except FileNotFoundError as missing:
        yield (name, "", f"not measured: {missing.filename or missing} is missing")


def _processor() -> str:
    """Return the CPU name from /proc/cpuinfo, else the architecture."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
