"""A controller is killed with SIGKILL at each named point of its tick and of its executor, and the next one carries on.

Meanwhile jobs start, resize, miss their deadline and finish. No accepted job is lost, no slot is used twice, and no
process is left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler.domain.commands import AddNode, CancelJob, Command, CommandBody, CreatePool, ScaleJob, SubmitJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job import Job, JobSpec
from scheduler.domain.job_state import JobState
from scheduler.executors.local_executor import CRASH_POINTS
from scheduler.executors.local_run import find_marked_processes
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import a_node
from tests.e2e.killable_controller import settings
from tests.usage_check import check_usage

ROOT = Path(__file__).parents[2]
RANK_SCRIPT = Path(__file__).with_name("torchless_rank.py")
OF_THE_TICK = ("before-observe", "after-load", "before-commit", "after-commit", "after-converge")
# Points that every tick passes. The tenth passage is in the middle of the test.
PASSED_OFTEN = (*OF_THE_TICK, "during-observe", "before-first-effect", "after-last-effect")
# tests/contract/test_local_crash_points.py kills the executor alone at each of its points.
SHORT = ("between-two-spawns",)
OTHERS = [pytest.param(point, marks=pytest.mark.full) for point in (*OF_THE_TICK, *CRASH_POINTS) if point not in SHORT]
TIMEOUT_S = 180.0
STEPS = 150
LEAVE_GRACE_S = 0.6


class ControllerHarness:
    """The jobs of the test in one folder, run by one controller after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        url = settings(folder).database_url
        migrate(url)
        self.store = SqlStore(url)
        self._controllers: list[subprocess.Popen[bytes]] = []
        self._sent = 0

    def send(self, body: CommandBody) -> None:
        self._sent += 1
        self.store.send(Command(f"harness-{self._sent}", time.time(), body))

    def start_controller(self, point: str = "never", passage: int = 1) -> subprocess.Popen[bytes]:
        controls = [str(self.folder), point, str(passage), str(LEAVE_GRACE_S), "--torchless"]
        arguments = [sys.executable, "-m", "tests.e2e.killable_controller", *controls]
        with (self.folder / "controller.log").open("ab") as log:
            controller = subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=log)
        self._controllers.append(controller)
        return controller

    def job(self, job_id: str) -> Job | None:
        live = self.store.load().snapshot.jobs.get(job_id)
        return live or self.store.get_ended_job(job_id)

    def wait(self, reached: Callable[[], bool], *, controller: subprocess.Popen[bytes]) -> bool:
        """Wait for `reached`. Return False if the controller dies before."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not reached():
            if controller.poll() is not None:
                return False
            assert time.monotonic() < deadline_s, f"not reached: {self.store.load().snapshot.jobs}"
            time.sleep(0.05)
        return True

    def close(self) -> None:
        for controller in self._controllers:
            controller.kill()
            controller.wait()
        for process in find_marked_processes(self.folder / "run"):
            process.kill()
        self.store.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ControllerHarness]:
    harness = ControllerHarness(tmp_path)
    yield harness
    harness.close()


@pytest.mark.e2e
@pytest.mark.parametrize("point", [*SHORT, *OTHERS])
def test_next_controller_carries_on_after_a_kill(point: str, harness: ControllerHarness) -> None:
    _submit_jobs(harness)
    first = harness.start_controller(point, 10 if point in PASSED_OFTEN else 1)
    _send_commands(harness, first)
    first.wait(TIMEOUT_S)
    assert first.returncode == -signal.SIGKILL, (harness.folder / "controller.log").read_text()

    second = harness.start_controller()
    _send_commands(harness, second)
    assert harness.wait(lambda: _state(harness, "mover") is JobState.SUCCEEDED, controller=second)
    assert harness.wait(lambda: _is_over(harness, "stubborn"), controller=second)
    mover = harness.job("mover")
    assert mover is not None
    assert mover.progress.steps == STEPS
    assert mover.account.failures == 0, "a killed controller must not count as a failure of the job"
    assert sum(entry.gpu_s for entry in check_usage(harness.store)) > 1.0
    assert not (harness.folder / "double").exists(), "two processes used a slot at once"
    second.send_signal(signal.SIGTERM)
    assert second.wait(TIMEOUT_S) == 0
    assert not find_marked_processes(harness.folder / "run")


def _submit_jobs(harness: ControllerHarness) -> None:
    harness.send(CreatePool(Pool("training", PoolKind.TRAINING)))
    harness.send(AddNode(a_node("t0", gpus=2, gpu="cpu")))
    harness.send(AddNode(a_node("t1", gpus=2, gpu="cpu")))
    for name, behavior in (("mover", "obey"), ("stubborn", "ignore")):
        command = ("python", "-SE", str(RANK_SCRIPT), str(harness.folder), behavior)
        steps = STEPS if behavior == "obey" else 1_000_000
        harness.send(SubmitJob(name, JobSpec(name=name, min_gpus=1, max_gpus=1, steps=steps, command=command)))


def _send_commands(harness: ControllerHarness, controller: subprocess.Popen[bytes]) -> None:
    """Widen both jobs, then cancel the one that ignores its deadline. Repeated commands do no harm."""
    if not harness.wait(lambda: _runs(harness, "mover") and _runs(harness, "stubborn"), controller=controller):
        return
    harness.send(ScaleJob("mover", 2, 2))
    harness.send(ScaleJob("stubborn", 2, 2))
    if not harness.wait(
        lambda: all(_width(harness, job_id) == 2 for job_id in ("mover", "stubborn")), controller=controller
    ):
        return
    harness.send(CancelJob("stubborn"))
    harness.wait(lambda: _is_over(harness, "stubborn") and _is_over(harness, "mover"), controller=controller)


def _state(harness: ControllerHarness, job_id: str) -> JobState | None:
    job = harness.job(job_id)
    return job.state if job else None


def _runs(harness: ControllerHarness, job_id: str) -> bool:
    return _state(harness, job_id) is JobState.RUNNING or _is_over(harness, job_id)


def _width(harness: ControllerHarness, job_id: str) -> int:
    """Return the GPUs of a running job, or the requested number if the job has ended."""
    job = harness.job(job_id)
    if job is None or job.is_ended:
        return 2
    return job.allocation.target_gpus if job.state is JobState.RUNNING else 0


def _is_over(harness: ControllerHarness, job_id: str) -> bool:
    job = harness.job(job_id)
    return job is not None and job.is_ended


@pytest.mark.e2e
def test_no_other_controller_leads_while_one_of_this_machine_is_stopped(harness: ControllerHarness) -> None:
    """Its workers keep running and it may resume at any time, so another leader would start their jobs twice."""
    first = harness.start_controller()
    harness.wait(lambda: harness.store.get_lease() is not None, controller=first)
    second = harness.start_controller()
    before = harness.store.get_lease()
    assert before is not None
    first.send_signal(signal.SIGSTOP)
    harness.wait(lambda: time.time() > before.expires_at_s + 3.0, controller=second)
    after = harness.store.get_lease()
    assert after is not None
    assert (after.holder, after.epoch) == (before.holder, before.epoch)
    first.kill()
    harness.wait(
        lambda: (lease := harness.store.get_lease()) is not None and lease.epoch > before.epoch, controller=second
    )
