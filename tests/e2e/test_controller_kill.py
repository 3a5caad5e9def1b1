"""The controller is killed with SIGKILL at every named point of its tick and of its executor, while jobs start,
resize, are killed at their deadline and finish. The next controller carries on: no accepted job is lost, no slot
is ever used by two, no process is left."""

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
from tests.books import check_usage
from tests.builders import a_node
from tests.e2e.killable_controller import settings

ROOT = Path(__file__).parents[2]
RANK_SCRIPT = Path(__file__).with_name("kill_rank.py")
OF_THE_TICK = ("before-observe", "after-load", "before-commit", "after-commit", "after-converge")
# Points that every tick passes: the tenth passage lies in the middle of the story.
PASSED_OFTEN = (*OF_THE_TICK, "during-observe", "before-first-effect", "after-last-effect")
# The executor's other points: as it alone dies at each of them in tests/contract/test_local_crash_points.py.
SAMPLED = ("after-take-over", "before-started-record", "between-two-spawns", "after-notice", "after-kill")
OTHERS = [pytest.param(point, marks=pytest.mark.full) for point in CRASH_POINTS if point not in SAMPLED]
PATIENCE_S = 180.0
STEPS = 150
LEAVE_GRACE_S = 0.6


class Play:
    """One story on one folder, told to one controller after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        url = settings(folder).database_url
        migrate(url)
        self.store = SqlStore(url)
        self._controllers: list[subprocess.Popen[bytes]] = []
        self._sent = 0

    def send(self, body: CommandBody) -> None:
        self._sent += 1
        self.store.send(Command(f"play-{self._sent}", time.time(), body))

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
        """Until `reached`; False where the controller died before."""
        limit_s = time.monotonic() + PATIENCE_S
        while not reached():
            if controller.poll() is not None:
                return False
            assert time.monotonic() < limit_s, f"not reached: {self.store.load().snapshot.jobs}"
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
def play(tmp_path: Path) -> Iterator[Play]:
    made = Play(tmp_path)
    yield made
    made.close()


@pytest.mark.e2e
@pytest.mark.parametrize("point", [*OF_THE_TICK, *SAMPLED, *OTHERS])
def test_after_a_kill_the_next_controller_carries_on(point: str, play: Play) -> None:
    _open(play)
    first = play.start_controller(point, 10 if point in PASSED_OFTEN else 1)
    _tell(play, first)
    first.wait(PATIENCE_S)
    assert first.returncode == -signal.SIGKILL, (play.folder / "controller.log").read_text()

    second = play.start_controller()
    _tell(play, second)
    assert play.wait(lambda: _state(play, "mover") is JobState.SUCCEEDED, controller=second)
    assert play.wait(lambda: _is_over(play, "stubborn"), controller=second)
    mover = play.job("mover")
    assert mover is not None
    assert mover.progress.steps == STEPS
    assert mover.account.failures == 0, "a controller's death is not the job's fault"
    assert sum(entry.gpu_s for entry in check_usage(play.store)) > 1.0
    assert not (play.folder / "double").exists(), "a slot was used by two at once"
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 0
    assert not find_marked_processes(play.folder / "run")


def _open(play: Play) -> None:
    play.send(CreatePool(Pool("training", PoolKind.TRAINING)))
    play.send(AddNode(a_node("t0", gpus=2, gpu="cpu")))
    play.send(AddNode(a_node("t1", gpus=2, gpu="cpu")))
    for name, behaviour in (("mover", "obey"), ("stubborn", "ignore")):
        command = ("python", "-SE", str(RANK_SCRIPT), str(play.folder), behaviour)
        steps = STEPS if behaviour == "obey" else 1_000_000
        play.send(SubmitJob(name, JobSpec(name=name, min_gpus=1, max_gpus=1, steps=steps, command=command)))


def _tell(play: Play, controller: subprocess.Popen[bytes]) -> None:
    """Widen one job, move the other past its deadline, cancel it; commands that were sent before do no harm."""
    if not play.wait(lambda: _runs(play, "mover") and _runs(play, "stubborn"), controller=controller):
        return
    play.send(ScaleJob("mover", 2, 2))
    play.send(ScaleJob("stubborn", 2, 2))
    if not play.wait(lambda: _width(play, "mover") == 2 and _width(play, "stubborn") == 2, controller=controller):
        return
    play.send(CancelJob("stubborn"))
    play.wait(lambda: _is_over(play, "stubborn") and _is_over(play, "mover"), controller=controller)


def _state(play: Play, job_id: str) -> JobState | None:
    job = play.job(job_id)
    return job.state if job else None


def _runs(play: Play, job_id: str) -> bool:
    return _state(play, job_id) is JobState.RUNNING or _is_over(play, job_id)


def _width(play: Play, job_id: str) -> int:
    """GPUs of a running job; the width asked for where it has ended."""
    job = play.job(job_id)
    if job is None or job.is_ended:
        return 2
    return job.allocation.target_gpus if job.state is JobState.RUNNING else 0


def _is_over(play: Play, job_id: str) -> bool:
    job = play.job(job_id)
    return job is not None and job.is_ended


@pytest.mark.e2e
def test_nobody_leads_beside_a_controller_of_this_machine_that_was_stopped(play: Play) -> None:
    """Its workers run on, and it may wake at any moment: whoever led meanwhile would start their jobs a second time."""
    first = play.start_controller()
    play.wait(lambda: play.store.get_lease() is not None, controller=first)
    second = play.start_controller()
    before = play.store.get_lease()
    assert before is not None
    first.send_signal(signal.SIGSTOP)
    play.wait(lambda: time.time() > before.expires_at_s + 3.0, controller=second)
    after = play.store.get_lease()
    assert after is not None
    assert (after.holder, after.epoch) == (before.holder, before.epoch)
    first.kill()
    play.wait(lambda: (held := play.store.get_lease()) is not None and held.epoch > before.epoch, controller=second)
