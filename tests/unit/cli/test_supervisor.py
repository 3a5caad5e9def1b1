"""Supervisor: child processes are started again when they end, and stop on signals and when the supervisor dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

TIMEOUT_S = 30.0
WAITING_CHILD = "import time; time.sleep(600)"
DEAF_CHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
CHILD_THAT_WATCHES = "from cli.supervisor import exit_with_parent; exit_with_parent(); import time; time.sleep(600)"


def supervisor_of(tmp_path: Path, scripts: dict[str, str], grace_s: float = 20.0) -> subprocess.Popen[str]:
    """Start a process that supervises the scripts. Each script writes its process ID to a file named after it."""
    commands = {
        name: [
            sys.executable,
            "-c",
            f"import os; open({str(tmp_path / name)!r}, 'w').write(str(os.getpid()))\n{script}",
        ]
        for name, script in scripts.items()
    }
    program = (
        "import sys\nfrom cli.supervisor import supervise\n"
        f"code, why = supervise({commands!r}, grace_s={grace_s})\nprint(why)\nsys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"{what} did not happen in {TIMEOUT_S} s"
        time.sleep(0.02)


def pid_of(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text() != "", f"the start of {path.name}")
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signal_stops_every_child_and_succeeds(tmp_path: Path, number: int) -> None:
    supervisor = supervisor_of(tmp_path, {"one": WAITING_CHILD, "two": WAITING_CHILD})
    pids = [pid_of(tmp_path / name) for name in ("one", "two")]
    supervisor.send_signal(number)
    output, _ = supervisor.communicate(timeout=TIMEOUT_S)
    assert (supervisor.returncode, output) == (0, "stopped\n")
    assert all(is_gone(pid) for pid in pids)


def test_killed_child_is_started_again_alone(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, {"one": WAITING_CHILD, "two": WAITING_CHILD})
    first, other = (pid_of(tmp_path / name) for name in ("one", "two"))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: pid_of(tmp_path / "one") != first, "the second start")
    supervisor.terminate()
    output, _ = supervisor.communicate(timeout=TIMEOUT_S)
    assert (supervisor.returncode, output) == (0, "stopped\n")
    assert pid_of(tmp_path / "two") == other
    assert is_gone(pid_of(tmp_path / "one"))


@pytest.mark.parametrize(("script", "ending"), [("raise SystemExit(3)", "exit code 3"), ("", "exit code 0")])
def test_child_that_cannot_start_stops_the_others_and_fails(tmp_path: Path, script: str, ending: str) -> None:
    supervisor = supervisor_of(tmp_path, {"one": WAITING_CHILD, "two": script})
    output, _ = supervisor.communicate(timeout=TIMEOUT_S)
    assert supervisor.returncode == 1
    assert output.startswith(f"the two process exited 3 times soon after its start ({ending})")
    assert is_gone(pid_of(tmp_path / "one"))


def test_child_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, {"one": WAITING_CHILD, "two": DEAF_CHILD}, grace_s=0.6)
    pids = [pid_of(tmp_path / name) for name in ("one", "two")]
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "deaf\n"
    supervisor.terminate()
    output, _ = supervisor.communicate(timeout=TIMEOUT_S)
    assert (supervisor.returncode, output) == (1, "two did not exit in time and had to be killed\n")
    assert all(is_gone(pid) for pid in pids)


def test_children_exit_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, {"one": CHILD_THAT_WATCHES, "two": CHILD_THAT_WATCHES})
    pids = [pid_of(tmp_path / name) for name in ("one", "two")]
    supervisor.kill()
    supervisor.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: all(is_gone(pid) for pid in pids), "the end of both children")


def test_command_that_cannot_start_leaves_no_process(tmp_path: Path) -> None:
    from cli.supervisor import supervise

    note = "import os, sys, time; os.symlink(str(os.getpid()), sys.argv[1]); time.sleep(600)"
    good = [sys.executable, "-c", note, str(tmp_path / "one")]
    with pytest.raises(FileNotFoundError):
        supervise({"one": good, "two": [str(tmp_path / "no such program")]}, grace_s=20.0)
    assert not (tmp_path / "one").is_symlink() or is_gone(int((tmp_path / "one").readlink().name))


def test_unsupervised_process_survives_the_end_of_stdin() -> None:
    """In a container, standard input is /dev/null."""
    program = "from cli.supervisor import exit_with_parent; exit_with_parent(); import time; time.sleep(1)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, env=environment, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0
