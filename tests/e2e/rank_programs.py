"""Has ranks run a test's program, and reads what they found.

`python -m tests.e2e.rank_programs PROGRAM FOLDER RANK RANKS` is one rank of it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.e2e.forked_ranks import Farm


def found_by_ranks(farm: Farm, program: str, folder: Path, *, ranks: int) -> list[Any]:
    """The program's `main(FOLDER, RANK, RANKS)` in a process for each rank; the contents of the files
    `FOLDER/found-RANK.json`. What counts is the file that a rank wrote, not how it ended: gloo may abort when its
    peers have left."""
    folder.mkdir(exist_ok=True)
    generation, log = farm.new_generation(), folder / "log"
    for rank in range(ranks):
        argv = [sys.executable, "-m", "tests.e2e.rank_programs", program, str(folder), str(rank), str(ranks)]
        farm.start(generation, rank, argv, {}, log)
    farm.wait(generation)
    files = [folder / f"found-{rank}.json" for rank in range(ranks)]
    assert all(file.exists() for file in files), log.read_text()[-3000:]
    return [json.loads(file.read_text()) for file in files]


def main(program: str, folder: Path, rank: int, ranks: int) -> None:
    """Without the teardown of torch, in which gloo may abort."""
    try:
        importlib.import_module(program).main(folder, rank, ranks)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
