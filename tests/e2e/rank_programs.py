"""Runs a test's program on real ranks and collects their results.

`python -m tests.e2e.rank_programs PROGRAM FOLDER RANK RANKS [WORD ...]` runs one rank.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.e2e.rank_launcher import RankLauncher


def run_on_ranks(launcher: RankLauncher, program: str, folder: Path, *words: str, ranks: int) -> list[Any]:
    """Run the program's `main(FOLDER, RANK, RANKS, *words)` in one process per rank and return the contents of
    `FOLDER/found-RANK.json`.

    Exit codes are ignored, because Gloo may abort when its peers have left.
    """
    folder.mkdir(exist_ok=True)
    generation, log = launcher.new_generation(), folder / "log"
    for rank in range(ranks):
        argv = [sys.executable, "-m", "tests.e2e.rank_programs", program, str(folder), str(rank), str(ranks), *words]
        launcher.start(generation, rank, argv, {}, log)
    launcher.wait(generation)
    files = [folder / f"found-{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), log.read_text()[-3000:]
    return [json.loads(file.read_text()) for file in files]


def main(program: str, folder: Path, rank: int, ranks: int, *words: str) -> None:
    """Run the program and exit without torch's teardown, in which Gloo may abort."""
    try:
        importlib.import_module(program).main(folder, rank, ranks, *words)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
