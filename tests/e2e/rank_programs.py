"""Starts one process for each rank of a test's program, and reads what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 240.0


def found_by_ranks(program: str, folder: Path, *, ranks: int) -> list[Any]:
    """`python -m PROGRAM FOLDER RANK RANKS` for each rank; the contents of the files `FOLDER/found-RANK.json`. What
    counts is the file that a rank wrote, not how it ended: gloo may abort when its peers have left."""
    folder.mkdir(exist_ok=True)
    started = [_start(program, folder, rank, ranks) for rank in range(ranks)]
    try:
        for process in started:
            process.wait(timeout=PATIENCE_S)
    finally:
        for process in started:
            process.kill()
            process.wait()
    files = [folder / f"found-{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), (folder / "log").read_text()[-3000:]
    return [json.loads(file.read_text()) for file in files]


def _start(program: str, folder: Path, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", program, str(folder), str(rank), str(ranks)],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
