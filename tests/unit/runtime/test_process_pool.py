"""Processes of a pool exit when their parent ends for any reason, whether they are busy or idle."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PATIENCE_S = 60.0
POOL = """
import os, signal, sys, time
from pathlib import Path
from scheduler.runtime.process_pool import ProcessPool

def work(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ProcessPool(2) as pool:
        pool.submit(work, Path(sys.argv[1])).result()
"""
SWEEP = """
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.seed_sweep import simulate_seeds
from tests.unit.simulator.test_seed_sweep import INPUTS

def never(snapshot, settings):
    (Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    simulate_seeds(INPUTS, [replace(load_policy_set("fifo"), order=never)], (1, 2), processes=2)
"""
IDLE = """
import os, signal, sys, time
from pathlib import Path
from scheduler.runtime.process_pool import ProcessPool

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ProcessPool(1) as pool:
        (Path(sys.argv[1]) / str(pool.submit(os.getpid).result())).touch()
        time.sleep(600)
"""
CASES = [
    pytest.param(POOL, 1, signal.SIGTERM, id="busy pool, SIGTERM"),
    pytest.param(POOL, 1, signal.SIGINT, id="busy pool, SIGINT"),
    pytest.param(POOL, 1, signal.SIGKILL, id="busy pool, SIGKILL"),
    pytest.param(IDLE, 1, signal.SIGTERM, id="idle pool, SIGTERM"),
    pytest.param(IDLE, 1, signal.SIGINT, id="idle pool, SIGINT"),
    pytest.param(IDLE, 1, signal.SIGKILL, id="idle pool, SIGKILL"),
    pytest.param(SWEEP, 2, signal.SIGINT, id="sweep, SIGINT"),
    pytest.param(SWEEP, 2, signal.SIGTERM, id="sweep, SIGTERM", marks=pytest.mark.full),
    pytest.param(SWEEP, 2, signal.SIGKILL, id="sweep, SIGKILL", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("script", "count", "number"), CASES)
def test_no_process_outlives_its_parent(tmp_path: Path, script: str, count: int, number: signal.Signals) -> None:
    path, folder = tmp_path / "parent.py", tmp_path / "pids"
    path.write_text(script)
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, str(path), str(folder)], env=env, stderr=subprocess.PIPE) as parent:
        children = _children(parent, folder, count)
        parent.send_signal(number)
        try:
            assert parent.wait(PATIENCE_S) == -number
            assert all(_ends(child) for child in children)
        finally:
            parent.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def _children(parent: subprocess.Popen[bytes], folder: Path, count: int) -> list[psutil.Process]:
    """Return all children of the parent once `count` of them report that they work."""
    limit_s = time.monotonic() + PATIENCE_S
    while len(list(folder.iterdir())) < count:
        assert parent.poll() is None, parent.communicate()[1]
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    children = psutil.Process(parent.pid).children(recursive=True)
    assert {int(path.name) for path in folder.iterdir()} <= {child.pid for child in children}
    return children


def _ends(process: psutil.Process) -> bool:
    """Tell whether the process exits. Without a reaper for orphans it stays as a zombie."""
    limit_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit_s:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
