"""Starts one process for each rank of a test's program, and reads what they found.

`python -m tests.e2e.rank_programs PROGRAM FOLDER RANKS` loads the program once, and with it torch, and forks the ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 240.0


def found_by_ranks(program: str, folder: Path, *, ranks: int) -> list[Any]:
    """The program's `main(FOLDER, RANK, RANKS)` in a process for each rank; the contents of the files
    `FOLDER/found-RANK.json`. What counts is the file that a rank wrote, not how it ended: gloo may abort when its
    peers have left."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.e2e.rank_programs", program, str(folder), str(ranks)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        parent = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=log, stderr=log, process_group=0)
    try:
        parent.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    files = [folder / f"found-{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), (folder / "log").read_text()[-3000:]
    return [json.loads(file.read_text()) for file in files]


def main(program: str, folder: Path, ranks: int) -> None:
    """Ends when all ranks have."""
    run = importlib.import_module(program).main
    started = [os.fork() or _rank(run, folder, rank, ranks) for rank in range(ranks)]
    for pid in started:
        os.waitpid(pid, 0)


def _rank(run: Any, folder: Path, rank: int, ranks: int) -> int:
    """In the process of the rank; it never returns."""
    try:
        run(folder, rank, ranks)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
