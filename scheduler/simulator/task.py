"""`python -m scheduler.simulator.task FOLDER`: plays the simulation whose files lie there, in a process of its own.

In the folder are jobs.csv, demand.csv (where there is one), cluster.yaml and task.json: policies, seed, and what the
process may take. It writes progress.json while it plays, then report.json, or failure.txt where the simulation itself
cannot be played. It gives way to everything else, and ends with its parent, whose end closes its standard input.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scheduler.documents.plain import plain
from scheduler.executors.whole_file import write_whole
from scheduler.simulator.policy_faults import PolicyError
from scheduler.simulator.sweep import simulate_seeds
from scheduler.simulator.task_files import read_files, without_folder

TASK, PROGRESS, REPORT, FAILURE = "task.json", "progress.json", "report.json", "failure.txt"
NICENESS = 10
TELL_S = 0.5


def main(folder: Path) -> int:
    asked = json.loads((folder / TASK).read_text())
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["cpu_s"], asked["cpu_s"] + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        write_whole(folder / REPORT, _played(folder, asked["policies"], asked["seed"]))
    except (ValueError, PolicyError) as wrong:
        return _failed(folder, without_folder(str(wrong), folder))
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # to say so takes some
        return _failed(folder, f"it needs more memory than the {asked['memory_bytes']} bytes that it may have")
    return 0


def _played(folder: Path, policies: Sequence[str], seed: int) -> Any:
    """What `ebbtide simulate -o json` prints."""
    inputs = read_files(folder)
    (report,) = simulate_seeds(inputs, policies, (seed,), progress=_teller(folder, policies, len(inputs.jobs)))
    return plain(report.to_json())


def _teller(folder: Path, policies: Sequence[str], jobs: int) -> Callable[[int, int], None]:
    told_s = -TELL_S

    def tell(done: int, total: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= TELL_S:
            told_s = time.monotonic()
            playing = policies[min(done // jobs, len(policies) - 1)]
            write_whole(folder / PROGRESS, {"playing": playing, "jobs_done": done})

    tell(0, 0)
    return tell


def _failed(folder: Path, why: str) -> int:
    (folder / FAILURE).write_text(why)
    return 1


def _end_with_parent(folder: Path) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
