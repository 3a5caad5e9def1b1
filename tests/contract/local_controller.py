"""A small controller that ends itself with SIGKILL at a named point: `python -m tests.contract.local_controller`.

It walks through three desired states: two jobs start; one is moved; the other is killed at its deadline. Before it
puts a state into effect it notes the state's number, as a store would commit it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from scheduler.domain.observation import Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.local_executor import LocalExecutor
from tests.contract.local_rig import RENDEZVOUS, desired, drive, moved, phases, rank_job

NOW_S = 1000.0
OF_THE_CONTROLLER = ("after-commit", "during-a-save")


def state(number: int, folder: Path) -> Snapshot:
    """Return the desired state committed under `number`."""
    mover = rank_job("mover", "obey", {"t0": (0, 1)}, folder, SAVE_S="0.3")
    stayer = rank_job("stayer", "ignore_notices", {"i0": (0,), "t0": (2,)}, folder)
    if number >= 2:
        mover = moved(mover, {"t1": (0,), "i1": (0, 1)}, leave_by_s=NOW_S + 60, folder=folder)
    if number >= 3:
        stayer = moved(stayer, {"t0": (0,)}, leave_by_s=NOW_S, folder=folder)
    return desired(number, mover, stayer)


def committed(folder: Path) -> int:
    path = folder / "committed"
    return int(path.read_text()) if path.exists() else 0


def main(folder: Path, point: str) -> None:
    at = _killer(point)
    executor = LocalExecutor(
        folder / "run", now=lambda: NOW_S, rendezvous_command=RENDEZVOUS, preload=(), on_crash_point=at
    )
    for number in (1, 2, 3):
        executor.observe()
        (folder / "committed").write_text(str(number))
        at("after-commit")
        executor.converge(state(number, folder))
        drive(executor, state(number, folder), _reached(number, lambda: _look_for_a_save(folder, at)))
    sys.exit(f"the point {point} was never passed")


def _killer(point: str) -> Callable[[str], None]:
    """Kill at the second pass of points that every tick passes, so that there is something to recover."""
    passages = 0

    def at(name: str) -> None:
        nonlocal passages
        passages += name == point
        if passages >= (2 if point in ("during-observe", "before-first-effect", "after-last-effect") else 1):
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def _reached(number: int, meanwhile: Callable[[], None]) -> Callable[[Observation], bool]:
    """Return whether all generations of state `number` run."""
    wanted = {("mover", 2 if number >= 2 else 1): "running", ("stayer", 2 if number >= 3 else 1): "running"}

    def reached(seen: Observation) -> bool:
        meanwhile()
        return wanted.items() <= phases(seen).items()

    return reached


def _look_for_a_save(folder: Path, at: Callable[[str], None]) -> None:
    status = folder / "run/jobs/mover/gen-1/status-0.json"
    if status.exists() and "saving" in status.read_text():
        at("during-a-save")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
