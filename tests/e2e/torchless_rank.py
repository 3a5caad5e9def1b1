"""A rank without torch, for tests that kill controllers: it steps, saves checkpoints and reads notices.

It holds a lock on its slot while it lives, and creates a file `double` if another process already holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STEP_S = 0.02
CHECKPOINT_EVERY = 10
RUN_DIR = Path(os.environ["EBBTIDE_RUN_DIR"])
CHECKPOINT = Path(os.environ["EBBTIDE_CHECKPOINT_DIR"]) / "steps"
STEPS = int(os.environ["EBBTIDE_STEPS"])
RANK = int(os.environ["RANK"])


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{RANK}.part")
    part.write_text(text)
    part.replace(path)


def say(phase: str, **more: Any) -> None:
    write(RUN_DIR / f"status-{RANK}.json", json.dumps({"rank": RANK, "pid": os.getpid(), "phase": phase, **more}))


def hold_slot(folder: Path) -> Any:
    """Lock this rank's slot."""
    gpu = os.environ["EBBTIDE_GPUS"].split(",")[int(os.environ["LOCAL_RANK"])]
    slot = (folder / f"slot-{os.environ['EBBTIDE_NODE']}-{gpu}").open("a")
    try:
        fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / "double").touch()
    return slot


def train(*, obeys: bool) -> None:
    step = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    saved = step
    while step < STEPS:
        say("running", step=step, checkpoint_step=saved)
        time.sleep(STEP_S)
        step += 1
        leaves = obeys and (RUN_DIR / "notice.json").exists()
        if RANK == 0 and (leaves or step % CHECKPOINT_EVERY == 0):
            say("saving", step=step, checkpoint_step=saved)
            write(CHECKPOINT, str(step))
            saved = step
        if leaves:
            return say("left", step=step, checkpoint_step=step)
    if RANK == 0:
        write(CHECKPOINT, str(STEPS))
    return say("succeeded", step=STEPS, checkpoint_step=STEPS)


if __name__ == "__main__":
    held = hold_slot(Path(sys.argv[1]))
    train(obeys=sys.argv[2] == "obey")
