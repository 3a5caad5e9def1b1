"""Children live and die together, whatever happens to whom."""

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

PATIENCE_S = 30.0
WAITING_CHILD = "import time; time.sleep(600)"
DEAF_CHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
CHILD_THAT_WATCHES = "from cli.supervisor import exit_with_parent; exit_with_parent(); import time; time.sleep(600)"


def supervisor_of(tmp_path: Path, scripts: dict[str, str], grace_s: float = 20.0) -> subprocess.Popen[str]:
    """A process that supervises the scripts, each of which leaves its process id in a file of its name."""
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


def eventually(happened: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < give_up_at, f"{what} did not happen in {PATIENCE_S} s"
        time.sleep(0.02)


def pid_of(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text() != "", f"the start of {path.name}")
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_supervisor_that_is_asked_to_stop_ends_every_child_and_succeeds(tmp_path: Path, number: int) -> None:
    supervisor = supervisor_of(tmp_path, {"one": WAITING_CHILD, "two": WAITING_CHILD})
    pids = [pid_of(tmp_path / name) for name in ("one", "two")]
    supervisor.send_signal(number)
    said, _ = supervisor.communicate(timeout=PATIENCE_S)
    assert (supervisor.returncode, said) == (0, "stopped as asked\n")
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize(("script", "ending"), [("raise SystemExit(3)", "exit code 3"), ("", "exit code 0")])
def test_when_one_child_ends_by_itself_the_others_are_ended_and_it_fails(
    tmp_path: Path, script: str, ending: str
) -> None:
    supervisor = supervisor_of(tmp_path, {"one": WAITING_CHILD, "two": f"import time; time.sleep(0.3); {script}"})
    said, _ = supervisor.communicate(timeout=PATIENCE_S)
    assert supervisor.returncode == 1
    assert said == f"the two process ended by itself with {ending}; the rest was ended too\n"
    assert is_gone(pid_of(tmp_path / "one"))


def test_a_child_that_will_not_end_is_killed_after_its_grace_and_it_fails(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, {"one": WAITING_CHILD, "two": DEAF_CHILD}, grace_s=0.3)
    pids = [pid_of(tmp_path / name) for name in ("one", "two")]
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "deaf\n"
    supervisor.terminate()
    said, _ = supervisor.communicate(timeout=PATIENCE_S)
    assert (supervisor.returncode, said) == (1, "two did not end in time and had to be killed\n")
    assert all(is_gone(pid) for pid in pids)


def test_a_child_that_watches_its_parent_ends_even_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, {"one": CHILD_THAT_WATCHES, "two": CHILD_THAT_WATCHES})
    pids = [pid_of(tmp_path / name) for name in ("one", "two")]
    supervisor.kill()
    supervisor.communicate(timeout=PATIENCE_S)
    eventually(lambda: all(is_gone(pid) for pid in pids), "the end of both children")


def test_a_command_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    from cli.supervisor import supervise

    note = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    good = [sys.executable, "-c", note, str(tmp_path / "one")]
    with pytest.raises(FileNotFoundError):
        supervise({"one": good, "two": [str(tmp_path / "no such program")]}, grace_s=20.0)
    assert not (tmp_path / "one").exists() or is_gone(int((tmp_path / "one").read_text()))


def test_a_process_that_nobody_supervises_outlives_the_end_of_its_input() -> None:
    """As in a container, where standard input is /dev/null."""
    program = "from cli.supervisor import exit_with_parent; exit_with_parent(); import time; time.sleep(1)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, env=environment, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0
