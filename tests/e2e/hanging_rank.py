"""A rank that stops making progress: `hanging_rank.py MODE STEPS FOLDER`.

It hangs once per job: where `FOLDER/<job>` exists, it goes on to its end instead. Modes: `sleep` and `spin` report
STEPS steps first, `block` has no session and does nothing, `compute` has no session and keeps a core busy, `start`
has a session and sleeps for STEPS seconds before its first step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def wait_forever() -> None:
    while True:
        time.sleep(0.2)


def spin_forever() -> None:
    while True:
        pass


def train(mode: str, steps: int, *, hangs: bool) -> None:
    import ebbtide

    with ebbtide.Session.from_environment() as session:
        session.mark_resumed(0)
        if mode == "start":
            time.sleep(steps)
        for step in range(1, steps + 1):
            time.sleep(0.05)
            session.report(step=step)
        if hangs and mode != "start":
            (spin_forever if mode == "spin" else wait_forever)()
        session.succeed()


def main() -> None:
    mode, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    marker = folder / f"{os.environ['EBBTIDE_JOB_ID']}-{os.environ['RANK']}"
    hangs = not marker.exists()
    marker.touch()
    if mode in ("sleep", "spin", "start"):
        train(mode, steps, hangs=hangs)
    elif hangs and mode == "block":
        wait_forever()
    elif mode == "compute":
        end_s = time.monotonic() + steps
        while time.monotonic() < end_s:
            pass


main()
