"""The node agent as a process: orders in, reports out, real ranks that are tiny scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from scheduler.executors.local_run import find_marked_processes
from scheduler.executors.log_files import read_lines
from scheduler.executors.rank_launch import RUN_DIR_VARIABLE, build_agent_environment
from scheduler.worker.node_agent import GRACE_S

PATIENCE_S = 30.0


class Rig:
    """One agent under test; generation 1 throughout."""

    def __init__(self, folder: Path, *preload: str, env: dict[str, str] | None = None, log_bytes: int = 2**30) -> None:
        self.folder = folder
        words = [word for module in preload for word in ("--preload", module)]
        words += ["--log-bytes", str(log_bytes)]
        self.log = folder / "agent.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scheduler.worker.node_agent", *words],
                env=build_agent_environment(env or {}, run_root=str(folder), inherited=os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.ready = self.report("ready")

    def start(self, script: str, *words: str, rank: int = 0, warm: bool = True, **env: str) -> None:
        """Start `script` as a rank; its text is a file `rank-<n>.py`."""
        path = self.folder / f"rank-{rank}.py"
        path.write_text(dedent(script))
        self.start_command([sys.executable, str(path), *words], rank=rank, warm=warm, **env)

    def start_command(self, argv: list[str], *, rank: int = 0, warm: bool = True, **env: str) -> None:
        variables = {**os.environ, "EBBTIDE_RUN_ROOT": str(self.folder), RUN_DIR_VARIABLE: str(self.run_dir), **env}
        self.order("start", rank=rank, argv=argv, env=variables, log=str(self.rank_log(rank)), warm=warm)

    def order(self, what: str, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({what: {"generation": 1, **fields}}).encode() + b"\n")
        self.process.stdin.flush()

    def report(self, what: str) -> dict[str, Any]:
        """The next report, which has to be this one."""
        assert self.process.stdout is not None
        found: dict[str, dict[str, Any]] = json.loads(self.process.stdout.readline())
        assert list(found) == [what], found
        return found[what]

    def ended(self) -> int:
        """The exit code of the one rank that was started."""
        self.report("started")
        code = self.report("ended")["code"]
        assert isinstance(code, int)
        return code

    @property
    def run_dir(self) -> Path:
        return self.folder / "gen-1"

    def rank_log(self, rank: int = 0) -> Path:
        return self.folder / f"rank-{rank}.log"

    def said(self, rank: int = 0) -> str:
        return self.rank_log(rank).read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        wait_for(lambda: not find_marked_processes(self.folder))


def wait_for(what: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < limit_s
        time.sleep(0.01)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("print('done')", 0, "done"),
        ("import sys; print('last words'); sys.exit(3)", 3, "last words"),
        ("import sys; sys.exit('out of slots')", 1, "out of slots"),
        ("{}['loss']", 1, "KeyError: 'loss'"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import atexit; atexit.register(print, 'at its exit')", 0, "at its exit"),
        ("import threading, time; threading.Timer(0.05, print, ['a thread ends too']).start()", 0, "a thread ends too"),
        ("import signal, os; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_a_rank_ends_as_it_would_in_an_interpreter_of_its_own(
    rig: Rig, warm: bool, script: str, code: int, said: str
) -> None:
    rig.start(script, warm=warm)
    assert rig.ended() == code
    assert said in rig.said()
    assert "scheduler.worker.node_agent" not in rig.said() or code == 1, "only a traceback may name the agent"


@pytest.mark.parametrize("warm", [True, False])
def test_a_rank_finds_its_own_arguments_variables_and_folders(rig: Rig, warm: bool) -> None:
    script = """
        import json, os, sys, signal
        facts = dict(
            argv=sys.argv, path=sys.path[0], name=__name__, file=__file__, here=os.getcwd(), own=os.environ.get("OWN"),
            agents=os.environ.get("OPENBLAS_NUM_THREADS"), leads=os.getpgrp() == os.getpid() == os.getsid(0),
            input=sys.stdin.read(), child=signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            main=sys.modules["__main__"].__dict__ is globals(), fds=sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        )
        print(json.dumps(facts))
    """
    rig.start(script, "--width", "3", warm=warm, OWN="yes")
    assert rig.ended() == 0, rig.said()
    path = str(rig.folder / "rank-0.py")
    assert json.loads(rig.said()) == {
        "argv": [path, "--width", "3"],
        "path": str(rig.folder),
        "name": "__main__",
        "file": path,
        "here": str(Path.cwd()),
        "own": "yes",
        "agents": os.environ.get("OPENBLAS_NUM_THREADS"),
        "leads": True,
        "input": "",
        "child": True,
        "main": True,
        "fds": [0, 1, 2],
    }


def test_a_module_is_run_by_its_name(rig: Rig) -> None:
    rig.start_command([sys.executable, "-m", "tests.unit.worker.no_such_module"])
    assert rig.ended() == 1
    assert "No module named" in rig.said()
    rig.start_command([sys.executable, "-m", "json.tool", "--help"], rank=1)
    assert rig.ended() == 0
    assert "usage:" in rig.said(1)


def test_what_is_loaded_once_is_there_in_each_fork_and_chance_is_not_shared(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "numpy", "tests.unit.worker.no_such_module")
    assert rig.ready["loaded"] == ["numpy"]
    assert "tests.unit.worker.no_such_module is not loaded beforehand" in rig.log.read_text()
    script = (
        "import sys; print('numpy' in sys.modules); import numpy, random; print(numpy.random.rand(), random.random())"
    )
    for rank in range(2):
        rig.start(script, rank=rank)
        assert rig.ended() == 0
    first, second = (rig.said(rank).split() for rank in range(2))
    assert first[0] == second[0] == "True"
    assert set(first[1:]).isdisjoint(second[1:])
    rig.close()


def test_an_agent_with_threads_executes_ranks_instead(tmp_path: Path) -> None:
    (tmp_path / "threadful.py").write_text(
        "import threading, time\nprint('hello')\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()"
    )
    rig = Rig(tmp_path, "threadful", env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"})
    rig.start("import sys; print('threadful' in sys.modules)")
    assert rig.ended() == 0
    assert rig.said() == "False\n"
    assert "2 threads run here, so that a rank is executed instead of forked" in rig.log.read_text()
    rig.close()


def test_what_cannot_be_started_is_told_and_others_are(rig: Rig) -> None:
    rig.start_command(["/no/such/program"], warm=False)
    assert rig.report("failed")["reason"] == "[Errno 2] No such file or directory: '/no/such/program'"
    rig.start("print('fine')", rank=1, EBBTIDE_RUN_DIR="x" * 5000)
    assert "has room for 4096 bytes, got 5000" in rig.report("failed")["reason"]
    rig.start("print('fine')", rank=2)
    assert rig.ended() == 0


@pytest.mark.parametrize("warm", [True, False])
def test_a_rank_and_what_it_forks_bear_the_mark_of_its_generation(rig: Rig, warm: bool) -> None:
    script = """
        import os, time
        for own_group in (False, True):
            if os.fork() == 0:
                if own_group:
                    os.setsid()
                time.sleep(600)
        time.sleep(600)
    """
    rig.start(script, warm=warm)
    pid = rig.report("started")["pid"]
    wait_for(lambda: len(find_marked_processes(rig.run_dir, variable=RUN_DIR_VARIABLE)) == 3)
    assert psutil.Process(rig.process.pid).environ()["EBBTIDE_RUN_ROOT"] == str(rig.folder)
    assert psutil.Process(pid).environ()["EBBTIDE_RUN_ROOT"] == str(rig.folder)
    rig.order("signal", rank=0, number=int(signal.SIGKILL))
    assert rig.report("ended")["code"] == -signal.SIGKILL
    (stray,) = find_marked_processes(rig.run_dir, variable=RUN_DIR_VARIABLE)
    assert os.getpgid(stray.pid) == stray.pid, "its group is gone with it, what left the group is found by the mark"
    stray.kill()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_die_with_their_agent(rig: Rig, warm: bool, number: int) -> None:
    for rank in range(3):
        rig.start("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", rank=rank, warm=warm)
        rig.report("started")
    os.kill(rig.process.pid, number)
    assert rig.process.wait(PATIENCE_S) == -number
    wait_for(lambda: not find_marked_processes(rig.folder))


def test_when_the_controller_is_gone_ranks_may_save_before_they_are_killed(rig: Rig) -> None:
    polite = """
        import signal, sys, time
        def save(*_): time.sleep(0.3); print("saved"); sys.exit(0)
        signal.signal(signal.SIGTERM, save); print("ready", flush=True); time.sleep(600)
    """
    rig.start(polite)
    rig.start(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)", rank=1
    )
    rig.report("started")
    rig.report("started")
    wait_for(lambda: "ready" in rig.said(0) and "ready" in rig.said(1))
    assert rig.process.stdin is not None
    rig.order("start", rank=2, argv=["true"], env={}, log=str(rig.rank_log(2)), warm=False)
    rig.report("started")
    rig.process.stdin.close()
    assert rig.process.wait(GRACE_S + PATIENCE_S) == 0
    assert rig.said(0).split() == ["ready", "saved"]
    assert not find_marked_processes(rig.folder)


def test_many_ranks_of_one_generation_after_another(rig: Rig) -> None:
    for _ in range(3):
        for rank in range(16):
            rig.start("import os; print(os.environ['RANK'])", rank=rank, RANK=str(rank))
        reports = [json.loads(rig.process.stdout.readline()) for _ in range(32)]  # type: ignore[union-attr]  # a pipe
        ended = [report["ended"] for report in reports if "ended" in report]
        assert sorted(each["rank"] for each in ended) == list(range(16))
        assert {each["code"] for each in ended} == {0}
    assert rig.said(11).split() == ["11"] * 3


@pytest.mark.parametrize("warm", [True, False])
def test_what_a_rank_prints_is_bounded_while_it_prints_and_ends_as_it_printed_it(tmp_path: Path, *, warm: bool) -> None:
    rig = Rig(tmp_path, log_bytes=65_536)
    try:
        rig.start(
            """
            import time
            for number in range(60_000):
                print(f"line {number:06d}", flush=True)
            time.sleep(2.5)
            print("last", flush=True)
            time.sleep(600)
            """,
            warm=warm,
        )
        rig.report("started")
        log = rig.rank_log()
        wait_for(lambda: log.exists() and log.stat().st_size >= 60_000 * 12 + 5)
        assert log.stat().st_blocks * 512 <= 65_536 + 8192
        part = read_lines(log, 0, lines_max=10_000, is_complete=False)
        assert part.dropped_bytes % 12 == 0
        first = part.dropped_bytes // 12
        told = [f"line {number:06d}" for number in range(first, 60_000)]
        assert [line.text for line in part.lines] == [*told, "last"]
    finally:
        rig.close()


def test_a_log_that_somebody_removes_leaves_the_others_bounded(tmp_path: Path) -> None:
    rig = Rig(tmp_path, log_bytes=65_536)
    try:
        for rank in (0, 1):
            rig.start("import time; time.sleep(600)", rank=rank)
            rig.report("started")
        rig.rank_log(0).unlink()
        with rig.rank_log(1).open("a") as file:
            file.write("x" * 1_000_000)
        wait_for(lambda: rig.rank_log(1).stat().st_blocks * 512 <= 65_536)
    finally:
        rig.close()
