"""One rank for the contract tests of the local executor: a script without torch, with one behavior per argument."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

RUN_DIR = Path(os.environ["EBBTIDE_RUN_DIR"])
RANK = int(os.environ["RANK"])


def say(phase: str, **more: object) -> None:
    part = RUN_DIR / f".status-{RANK}.part"
    part.write_text(json.dumps({"rank": RANK, "pid": os.getpid(), "phase": phase, **more}))
    part.replace(RUN_DIR / f"status-{RANK}.json")


def notice() -> bool:
    return (RUN_DIR / "notice.json").exists()


def wait_for(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.01)


def hold_slots() -> list[IO[str]]:
    folder = Path(os.environ["SLOT_DIR"])
    held: list[IO[str]] = []
    for name in (os.environ["SLOTS"].split(",")[RANK], f"{os.environ['EBBTIDE_JOB_ID']}-rank-{RANK}"):
        file = (folder / name).open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (folder / "double").touch()
        held.append(file)
    return held


def obey() -> None:
    """Run until a notice, save and leave. Ignores SIGTERM, like a worker in its own session."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("running", step=5, loss=2.5)
    wait_for(notice)
    say("saving", step=7)
    time.sleep(float(os.environ.get("SAVE_S", "0")))
    say("left", step=7, checkpoint_step=7, loss=2.0)
    if os.environ.get("ABORT"):
        os.abort()


def ignore_notices() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("running", step=5, checkpoint_step=3)
    time.sleep(600)


def finish() -> None:
    say("running", step=0)
    say("succeeded", step=10, checkpoint_step=10, loss=1.5)
    if os.environ.get("LINGER"):
        time.sleep(600)


def crash() -> None:
    """Rank 1 exits once rank 0 runs; rank 0 would wait for it forever."""
    if RANK == 1:
        wait_for((RUN_DIR / "status-0.json").exists)
        print("CUDA error: out of slots", flush=True)
        sys.exit(3)
    ignore_notices()


def fail() -> None:
    say("failed", step=0, reason="ValueError: the plan is for another model")


def run_out_of_memory() -> None:
    """Rank 1 reports that it ran out of memory; rank 0 reports that it lost its peer."""
    if RANK == 1:
        say("failed", reason="OutOfMemoryError", cause="out-of-memory", peak_bytes=900)
        sys.exit(1)
    wait_for((RUN_DIR / "status-1.json").exists)
    say("failed", reason="connection closed by peer", peak_bytes=700)


def be_killed() -> None:
    events, kills = os.environ.get("MEMORY_EVENTS", ""), os.environ.get("OOM_KILLS")
    say("running", step=5, memory_events=events, oom_kills=int(kills) if kills else None)
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    """Freeze one more layer than is already frozen."""
    say("running", step=5, frozen_layers=int(os.environ["EBBTIDE_FROZEN_LAYERS"]) + 1)
    wait_for(notice)


def spawn_child() -> None:
    """Start a child in the same process group and one in a new group."""
    for own_group in (False, True):
        subprocess.Popen(["sleep", "600"], start_new_session=own_group)
    obey()


def parent() -> None:
    """Exit with an error and leave a child behind."""
    subprocess.Popen(["sleep", "600"], start_new_session=bool(os.environ.get("OWN_GROUP")))
    sys.exit(1)


def stay_silent() -> None:
    time.sleep(600)


def finish_silently() -> None:
    print("all done")


BEHAVIORS = (
    obey,
    ignore_notices,
    finish,
    crash,
    fail,
    run_out_of_memory,
    be_killed,
    freeze,
    spawn_child,
    parent,
    stay_silent,
    finish_silently,
)

if __name__ == "__main__":
    HELD = hold_slots()
    {each.__name__: each for each in BEHAVIORS}[sys.argv[1]]()
