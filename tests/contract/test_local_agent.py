"""Node agents of the local executor: lifetime and failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from scheduler.domain.job import Job
from scheduler.domain.observation import Observation
from scheduler.executors.local_executor import LocalExecutor
from scheduler.executors.local_run import RunTimeouts, find_marked_processes
from scheduler.executors.rank_launch import RUN_DIR_VARIABLE
from scheduler.runtime.clock import ManualClock
from tests.contract.local_rig import (
    PATIENCE_S,
    RANK_SCRIPT,
    RENDEZVOUS,
    desired,
    drive,
    moved,
    phases,
    rank_job,
    run_of,
)

# A module whose import blocks until the file `loaded` exists. Only the reference trainer is forked, so it makes the
# rank's script a module of the trainer.
SLOW = f"""
import os, pathlib, time
import scheduler.trainer
scheduler.trainer.__path__.append({str(RANK_SCRIPT.parent)!r})
while not (pathlib.Path(os.environ["SLOT_DIR"]) / "loaded").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def executor(tmp_path: Path, clock: ManualClock, request: pytest.FixtureRequest) -> Iterator[LocalExecutor]:
    """Yield an executor whose agents preload nothing, or what the test names."""
    preload = getattr(request, "param", ())
    executor = LocalExecutor(tmp_path / "run", now=clock.now_s, rendezvous_command=RENDEZVOUS, preload=preload)
    yield executor
    executor.close(grace_s=0.0)
    assert not find_marked_processes(tmp_path / "run"), "nothing outlives the executor"
    assert not (tmp_path / "double").exists(), "no slot was ever used twice at once"


def agents(folder: Path, job_id: str = "a") -> dict[str, int]:
    """Return the pids of a job's live agents by node."""
    found = {}
    for process in psutil.Process().children():
        try:
            log = Path(f"/proc/{process.pid}/fd/2").readlink()
        except OSError:
            continue  # it has just ended
        if log.parent == folder / "run/jobs" / job_id and log.name.startswith("agent-"):
            found[log.stem.removeprefix("agent-")] = process.pid
    return found


def preloaded(job: Job) -> Job:
    """Return the job with a command that agents may fork."""
    command = ("python", "-m", f"scheduler.trainer.{RANK_SCRIPT.stem}", *job.spec.command[2:])
    return replace(job, spec=replace(job.spec, command=command))


def is_in(phase: str, generation: int, job_id: str = "a") -> Callable[[Observation], bool]:
    return lambda seen: phases(seen).get((job_id, generation)) == phase


def test_agent_lives_while_its_job_is_wanted_on_its_node(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0, 1), "t1": (0,)}, tmp_path)
    drive(executor, desired(1, job), is_in("running", 1))
    first = agents(tmp_path)
    assert set(first) == {"t0", "t1"}
    job = moved(job, {"t0": (1,), "i0": (0,)}, leave_by_s=1060.0, folder=tmp_path)
    drive(executor, desired(2, job), is_in("running", 2))
    drive(executor, desired(2, job), lambda _: set(agents(tmp_path)) == {"t0", "i0"})
    assert agents(tmp_path)["t0"] == first["t0"], "what it has loaded is used again"
    job = moved(job, {}, leave_by_s=1060.0, folder=tmp_path)
    drive(executor, desired(3, job), is_in("left", 2))
    drive(executor, desired(3, job), lambda _: not agents(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_agent_loses_the_run_and_all_its_processes(
    executor: LocalExecutor, tmp_path: Path, number: signal.Signals
) -> None:
    job = rank_job("a", "spawn_child", {"t0": (0, 1), "t1": (0,)}, tmp_path)
    other = rank_job("b", "obey", {"t0": (2,)}, tmp_path)
    both = {("a", 1): "running", ("b", 1): "running"}
    drive(executor, desired(1, job, other), lambda seen: phases(seen) == both)
    os.kill(agents(tmp_path)["t0"], number)
    seen = drive(executor, desired(1, job, other), is_in("lost", 1))
    run = run_of(seen, "a")
    assert (run.reason, run.gpus, run.steps) == (f"the agent of node t0 was killed by {number.name}", {}, 5.0)
    assert not find_marked_processes(tmp_path / "run/jobs/a/gen-1", variable=RUN_DIR_VARIABLE)
    assert phases(seen)["b", 1] == "running", "another job's agent on the same node is another"
    job = moved(job, job.allocation.target, leave_by_s=1000.0, folder=tmp_path)
    drive(executor, desired(2, job, other), is_in("running", 2))


def test_agent_that_exits_by_itself_fails_the_run(executor: LocalExecutor, tmp_path: Path) -> None:
    job = preloaded(rank_job("a", "obey", {"t0": (0,)}, tmp_path, PYTHONPATH=str(tmp_path / "broken")))
    (tmp_path / "broken/scheduler").mkdir(parents=True)
    (tmp_path / "broken/scheduler/__init__.py").write_text("raise SystemExit('no scheduler.worker in here')")
    run = run_of(drive(executor, desired(1, job), is_in("failed", 1)), "a")
    assert run.reason.startswith("the agent of node t0 exited with code 1:")
    assert "scheduler.worker" in run.reason


def test_invalid_environment_fails_the_run(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0,)}, tmp_path, BROKEN="a\0b")
    run = run_of(drive(executor, desired(1, job), is_in("failed", 1)), "a")
    assert run.reason == "rank 0 cannot be started: embedded null byte"


@pytest.mark.parametrize("executor", [("slow_module",)], indirect=True)
def test_run_continues_while_the_next_agents_preload(
    executor: LocalExecutor, tmp_path: Path, clock: ManualClock
) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW)
    (tmp_path / "loaded").touch()
    job = preloaded(rank_job("a", "obey", {"t0": (0,)}, tmp_path, PYTHONPATH=str(tmp_path)))
    drive(executor, desired(1, job), is_in("running", 1))
    (tmp_path / "loaded").unlink()
    wider = moved(job, {"t0": (0,), "t1": (0,)}, leave_by_s=1060.0, folder=tmp_path)
    for _ in range(5):
        executor.converge(desired(2, wider))
        assert is_in("running", 1)(executor.observe())
    assert set(agents(tmp_path)) == {"t0", "t1"}
    (tmp_path / "loaded").touch()
    _wait(executor.has_pending_changes)
    drive(executor, desired(2, wider), is_in("running", 2))

    (tmp_path / "loaded").unlink()
    elsewhere = moved(wider, {"i0": (0,)}, leave_by_s=1060.0, folder=tmp_path)
    executor.converge(desired(3, elsewhere))
    assert is_in("leaving", 2)(executor.observe()), "whoever waits for its GPUs does not wait for an agent too"


@pytest.mark.parametrize("executor", [("slow_module",)], indirect=True)
def test_wait_for_preloading_is_bounded(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW)
    (tmp_path / "loaded").touch()
    job = preloaded(rank_job("a", "ignore_notices", {"t0": (0,)}, tmp_path, PYTHONPATH=str(tmp_path)))
    drive(executor, desired(1, job), is_in("running", 1))
    (tmp_path / "loaded").unlink()
    wider = desired(2, moved(job, {"t0": (0,), "t1": (0,)}, leave_by_s=1060.0, folder=tmp_path))
    for at_s, phase in ((1000.0, "running"), (1029.0, "running"), (1030.0, "leaving")):
        clock.move_to(at_s)
        executor.converge(wider)
        assert is_in(phase, 1)(executor.observe())
    clock.move_to(1060.0)
    drive(executor, wider, is_in("lost", 1))


@pytest.mark.parametrize("executor", [("slow_module",)], indirect=True)
def test_deadline_applies_to_unstarted_ranks(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW)
    job = preloaded(rank_job("a", "obey", {"t0": (0,)}, tmp_path, PYTHONPATH=str(tmp_path)))
    drive(executor, desired(1, job), is_in("starting", 1))
    clock.move_to(1000.0 + 10 * RunTimeouts().status_s)
    executor.converge(desired(1, job))
    assert is_in("starting", 1)(executor.observe()), "it is not mute before it was started"
    away = desired(2, moved(job, {}, leave_by_s=clock.now_s(), folder=tmp_path))
    run = run_of(drive(executor, away, is_in("lost", 1)), "a")
    assert run.reason == "it was killed at its deadline"


def test_unresponsive_agent_is_killed(executor: LocalExecutor, tmp_path: Path, clock: ManualClock) -> None:
    job = rank_job("a", "ignore_notices", {"t0": (0, 1)}, tmp_path)
    drive(executor, desired(1, job), is_in("running", 1))
    os.kill(agents(tmp_path)["t0"], signal.SIGSTOP)
    away = desired(2, moved(job, {}, leave_by_s=1000.0, folder=tmp_path))
    for _ in range(3):
        executor.converge(away)
    assert run_of(executor.observe(), "a").gpus == {"t0": (0, 1)}
    clock.move_to(1000.0 + RunTimeouts().teardown_s)
    run = run_of(drive(executor, away, is_in("lost", 1)), "a")
    assert run.reason == "it was killed at its deadline"


def test_has_pending_changes(executor: LocalExecutor, tmp_path: Path) -> None:
    job = rank_job("a", "obey", {"t0": (0, 1)}, tmp_path)
    drive(executor, desired(1, job), is_in("running", 1))
    assert not executor.has_pending_changes()
    away = desired(2, moved(job, {}, leave_by_s=1060.0, folder=tmp_path))
    executor.converge(away)
    _wait(executor.has_pending_changes)
    drive(executor, away, is_in("left", 1))


def _wait(reached: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < limit_s
        time.sleep(0.01)
