"""The processes of the solver pool end with the controller that started them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

PATIENCE_S = 60.0
PARENT = """
import os, time
from scheduler.runtime.solver_pool import solver_pool
if __name__ == "__main__":
    pool = solver_pool(1)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def test_the_processes_of_a_killed_controller_do_not_wait_for_its_work_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        solver = psutil.Process(int(parent.stdout.readline()))
        assert solver.ppid() == parent.pid
        parent.kill()
    try:
        assert _ends(solver)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            solver.kill()


def _ends(process: psutil.Process) -> bool:
    """Whether it comes to its end; where nobody reaps orphans it stays as a zombie."""
    limit_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit_s:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
