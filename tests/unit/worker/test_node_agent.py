"""The node agent as a process: orders in, reports out, with small scripts as ranks."""

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

TIMEOUT_S = 30.0


class AgentHarness:
    """A running agent whose ranks all belong to generation 1."""

    def __init__(self, folder: Path, *preload: str, env: dict[str, str] | None = None, log_bytes: int = 2**30) -> None:
        self.folder = folder
        options = [word for module in preload for word in ("--preload", module)]
        options += ["--log-bytes", str(log_bytes)]
        self.log = folder / "agent.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scheduler.worker.node_agent", *options],
                env=build_agent_environment(env or {}, run_root=str(folder), inherited=os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.ready = self.read_report("ready")

    def start(self, script: str, *words: str, rank: int = 0, warm: bool = True, **env: str) -> None:
        """Write `script` to `rank-<n>.py` and start it as a rank."""
        path = self.folder / f"rank-{rank}.py"
        path.write_text(dedent(script))
        self.start_command([sys.executable, str(path), *words], rank=rank, warm=warm, **env)

    def start_command(self, argv: list[str], *, rank: int = 0, warm: bool = True, **env: str) -> None:
        variables = {**os.environ, "EBBTIDE_RUN_ROOT": str(self.folder), RUN_DIR_VARIABLE: str(self.run_dir), **env}
        self.send_order("start", rank=rank, argv=argv, env=variables, log=str(self.rank_log(rank)), warm=warm)

    def send_order(self, kind: str, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({kind: {"generation": 1, **fields}}).encode() + b"\n")
        self.process.stdin.flush()

    def read_report(self, kind: str) -> dict[str, Any]:
        """Return the next report, which must be of this kind."""
        assert self.process.stdout is not None
        report: dict[str, dict[str, Any]] = json.loads(self.process.stdout.readline())
        assert list(report) == [kind], report
        return report[kind]

    def wait_for_exit(self) -> int:
        """Return the exit code of the only rank."""
        self.read_report("started")
        code = self.read_report("ended")["code"]
        assert isinstance(code, int)
        return code

    @property
    def run_dir(self) -> Path:
        return self.folder / "gen-1"

    def rank_log(self, rank: int = 0) -> Path:
        return self.folder / f"rank-{rank}.log"

    def read_output(self, rank: int = 0) -> str:
        return self.rank_log(rank).read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        wait_for(lambda: not find_marked_processes(self.folder))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentHarness]:
    harness = AgentHarness(tmp_path)
    yield harness
    harness.close()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("script", "code", "output"),
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
def test_rank_exits_as_in_its_own_interpreter(
    agent: AgentHarness, warm: bool, script: str, code: int, output: str
) -> None:
    agent.start(script, warm=warm)
    assert agent.wait_for_exit() == code
    assert output in agent.read_output()
    # Only a traceback may mention the agent.
    assert "scheduler.worker.node_agent" not in agent.read_output() or code == 1, (
        "only a traceback may mention the agent"
    )


@pytest.mark.parametrize("warm", [True, False])
def test_rank_has_its_own_arguments_environment_and_descriptors(agent: AgentHarness, warm: bool) -> None:
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
    agent.start(script, "--width", "3", warm=warm, OWN="yes")
    assert agent.wait_for_exit() == 0, agent.read_output()
    path = str(agent.folder / "rank-0.py")
    assert json.loads(agent.read_output()) == {
        "argv": [path, "--width", "3"],
        "path": str(agent.folder),
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


def test_module_can_be_run_by_name(agent: AgentHarness) -> None:
    agent.start_command([sys.executable, "-m", "tests.unit.worker.no_such_module"])
    assert agent.wait_for_exit() == 1
    assert "No module named" in agent.read_output()
    agent.start_command([sys.executable, "-m", "json.tool", "--help"], rank=1)
    assert agent.wait_for_exit() == 0
    assert "usage:" in agent.read_output(1)


def test_forks_share_preloaded_modules_but_not_random_state(tmp_path: Path) -> None:
    agent = AgentHarness(tmp_path, "numpy", "tests.unit.worker.no_such_module")
    assert agent.ready["loaded"] == ["numpy"]
    assert "tests.unit.worker.no_such_module" in agent.log.read_text()
    script = (
        "import sys; print('numpy' in sys.modules); import numpy, random; print(numpy.random.rand(), random.random())"
    )
    for rank in range(2):
        agent.start(script, rank=rank)
        assert agent.wait_for_exit() == 0
    first, second = (agent.read_output(rank).split() for rank in range(2))
    assert first[0] == second[0] == "True"
    assert set(first[1:]).isdisjoint(second[1:])
    agent.close()


def test_agent_with_threads_executes_ranks_instead_of_forking(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nprint('hello')\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()"
    )
    agent = AgentHarness(tmp_path, "starts_a_thread", env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"})
    agent.start("import sys; print('starts_a_thread' in sys.modules)")
    assert agent.wait_for_exit() == 0
    assert agent.read_output() == "False\n"
    assert "2 threads" in agent.log.read_text()
    agent.close()


def test_failed_start_is_reported_and_does_not_affect_others(agent: AgentHarness) -> None:
    agent.start_command(["/no/such/program"], warm=False)
    assert agent.read_report("failed")["reason"] == "[Errno 2] No such file or directory: '/no/such/program'"
    agent.start("print('fine')", rank=1, EBBTIDE_RUN_DIR="x" * 5000)
    assert "5000 bytes" in agent.read_report("failed")["reason"]
    agent.start("print('fine')", rank=2)
    assert agent.wait_for_exit() == 0


@pytest.mark.parametrize("warm", [True, False])
def test_rank_and_its_children_are_found_by_their_run_directory(agent: AgentHarness, warm: bool) -> None:
    script = """
        import os, time
        for own_group in (False, True):
            if os.fork() == 0:
                if own_group:
                    os.setsid()
                time.sleep(600)
        time.sleep(600)
    """
    agent.start(script, warm=warm)
    pid = agent.read_report("started")["pid"]
    wait_for(lambda: len(find_marked_processes(agent.run_dir, variable=RUN_DIR_VARIABLE)) == 3)
    assert psutil.Process(agent.process.pid).environ()["EBBTIDE_RUN_ROOT"] == str(agent.folder)
    assert psutil.Process(pid).environ()["EBBTIDE_RUN_ROOT"] == str(agent.folder)
    agent.send_order("signal", rank=0, number=int(signal.SIGKILL))
    assert agent.read_report("ended")["code"] == -signal.SIGKILL
    # The rank's group is killed with it. A process that left the group is found by its environment.
    wait_for(lambda: len(find_marked_processes(agent.run_dir, variable=RUN_DIR_VARIABLE)) == 1)
    (stray,) = find_marked_processes(agent.run_dir, variable=RUN_DIR_VARIABLE)
    assert os.getpgid(stray.pid) == stray.pid
    stray.kill()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_die_with_the_agent(agent: AgentHarness, warm: bool, number: int) -> None:
    for rank in range(3):
        agent.start("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", rank=rank, warm=warm)
        agent.read_report("started")
    os.kill(agent.process.pid, number)
    assert agent.process.wait(TIMEOUT_S) == -number
    wait_for(lambda: not find_marked_processes(agent.folder))


def test_ranks_may_save_after_the_controller_has_died(agent: AgentHarness) -> None:
    saves_on_sigterm = """
        import signal, sys, time
        def save(*_): time.sleep(0.3); print("saved"); sys.exit(0)
        signal.signal(signal.SIGTERM, save); print("ready", flush=True); time.sleep(600)
    """
    agent.start(saves_on_sigterm)
    agent.start(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)", rank=1
    )
    agent.read_report("started")
    agent.read_report("started")
    wait_for(lambda: "ready" in agent.read_output(0) and "ready" in agent.read_output(1))
    assert agent.process.stdin is not None
    agent.send_order("start", rank=2, argv=["true"], env={}, log=str(agent.rank_log(2)), warm=False)
    agent.read_report("started")
    agent.process.stdin.close()
    assert agent.process.wait(GRACE_S + TIMEOUT_S) == 0
    assert agent.read_output(0).split() == ["ready", "saved"]
    assert not find_marked_processes(agent.folder)


def test_agent_starts_many_ranks_repeatedly(agent: AgentHarness) -> None:
    for _ in range(3):
        for rank in range(16):
            agent.start("import os; print(os.environ['RANK'])", rank=rank, RANK=str(rank))
        reports = [json.loads(agent.process.stdout.readline()) for _ in range(32)]  # type: ignore[union-attr]  # a pipe
        exits = [report["ended"] for report in reports if "ended" in report]
        assert sorted(exit_["rank"] for exit_ in exits) == list(range(16))
        assert {exit_["code"] for exit_ in exits} == {0}
    assert agent.read_output(11).split() == ["11"] * 3


@pytest.mark.parametrize("warm", [True, False])
def test_log_is_bounded_and_keeps_the_newest_lines(tmp_path: Path, *, warm: bool) -> None:
    agent = AgentHarness(tmp_path, log_bytes=65_536)
    try:
        agent.start(
            """
            import time
            for number in range(60_000):
                print(f"line {number:06d}", flush=True)
            time.sleep(1.3)
            print("last", flush=True)
            time.sleep(600)
            """,
            warm=warm,
        )
        agent.read_report("started")
        log = agent.rank_log()
        wait_for(lambda: log.exists() and log.stat().st_size >= 60_000 * 12 + 5)
        assert log.stat().st_blocks * 512 <= 65_536 + 8192
        part = read_lines(log, 0, lines_max=10_000, is_complete=False)
        assert part.dropped_bytes % 12 == 0
        first = part.dropped_bytes // 12
        expected = [f"line {number:06d}" for number in range(first, 60_000)]
        assert [line.text for line in part.lines] == [*expected, "last"]
    finally:
        agent.close()


def test_deleting_one_log_keeps_the_others_bounded(tmp_path: Path) -> None:
    agent = AgentHarness(tmp_path, log_bytes=65_536)
    try:
        for rank in (0, 1):
            agent.start("import time; time.sleep(600)", rank=rank)
            agent.read_report("started")
        agent.rank_log(0).unlink()
        with agent.rank_log(1).open("a") as file:
            file.write("x" * 1_000_000)
        wait_for(lambda: agent.rank_log(1).stat().st_blocks * 512 <= 65_536)
    finally:
        agent.close()
