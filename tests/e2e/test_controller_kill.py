"""API and controller are killed with SIGKILL at each named point of the tick, and the next ones carry on.

Meanwhile jobs start, resize, miss their deadline and finish. No accepted job is lost, no slot is used twice, no rank is
restarted, and no process is left.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.domain.commands import AddNode, CancelJob, CreatePool, ScaleJob, SubmitJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from tests.builders import a_node
from tests.e2e.service_harness import TIMEOUT_S, ServiceHarness
from tests.usage_check import check_usage

RANK_SCRIPT = Path(__file__).with_name("torchless_rank.py")
POINTS = ("before-observe", "after-load", "before-commit", "after-commit", "after-converge")
PASSAGE = 10
"""Every tick passes all points. The tenth passage is in the middle of the test."""
SHORT = "after-commit"
STEPS = 150
LEAVE_GRACE_S = 0.6


@pytest.mark.e2e
@pytest.mark.parametrize(
    "point", [point if point == SHORT else pytest.param(point, marks=pytest.mark.full) for point in POINTS]
)
def test_next_service_carries_on_after_a_kill(point: str, tmp_path: Path) -> None:
    site = ServiceHarness(tmp_path, grace_s=LEAVE_GRACE_S, options=("--die-at", f"{point}:{PASSAGE}"))
    try:
        _submit_jobs(site)
        _send_commands(site)
        site.service.wait(TIMEOUT_S)
        assert site.service.returncode == -signal.SIGKILL, site.log()
        site.start_service()
        _send_commands(site)
        site.wait(lambda: _is_over(site, "mover") and _is_over(site, "stubborn"))
        mover = site.job("mover")
        assert mover is not None
        assert (mover.state, mover.progress.steps) == (JobState.SUCCEEDED, STEPS)
        assert mover.account.failures == 0, "a killed service must not count as a failure of the job"
        assert len(site.generations("mover")) <= 2, "the kill must not restart a rank"
        assert sum(entry.gpu_s for entry in check_usage(site.store)) > 1.0
        assert not (site.shared / "double").exists(), "two processes used a slot at once"
        site.end()
    finally:
        site.close()


def _submit_jobs(site: ServiceHarness) -> None:
    site.send(CreatePool(Pool("training", PoolKind.TRAINING)))
    site.send(AddNode(a_node("t0", gpus=2, gpu="cpu")))
    site.send(AddNode(a_node("t1", gpus=2, gpu="cpu")))
    for name, behavior in (("mover", "obey"), ("stubborn", "ignore")):
        command = ("python", "-SE", str(RANK_SCRIPT), str(site.shared), behavior)
        steps = STEPS if behavior == "obey" else 1_000_000
        site.send(SubmitJob(name, JobSpec(name=name, min_gpus=1, max_gpus=1, steps=steps, command=command)))


def _send_commands(site: ServiceHarness) -> None:
    """Widen both jobs, then cancel the one that ignores its deadline. Repeated commands do no harm."""
    if not _wait(site, lambda: _runs(site, "mover") and _runs(site, "stubborn")):
        return
    site.send(ScaleJob("mover", 2, 2))
    site.send(ScaleJob("stubborn", 2, 2))
    if not _wait(site, lambda: all(_width(site, job_id) == 2 for job_id in ("mover", "stubborn"))):
        return
    site.send(CancelJob("stubborn"))
    _wait(site, lambda: _is_over(site, "stubborn") and _is_over(site, "mover"))


def _wait(site: ServiceHarness, reached: Callable[[], bool]) -> bool:
    """Wait for `reached`. Return False if the service dies before."""
    site.wait(lambda: site.service.poll() is not None or reached(), may_die=True)
    return site.service.poll() is None


def _state(site: ServiceHarness, job_id: str) -> JobState | None:
    job = site.job(job_id)
    return job.state if job else None


def _runs(site: ServiceHarness, job_id: str) -> bool:
    return _state(site, job_id) is JobState.RUNNING or _is_over(site, job_id)


def _width(site: ServiceHarness, job_id: str) -> int:
    """Return the GPUs of a running job, or the requested number if the job has ended."""
    job = site.job(job_id)
    if job is None or job.is_ended:
        return 2
    return job.allocation.target_gpus if job.state is JobState.RUNNING else 0


def _is_over(site: ServiceHarness, job_id: str) -> bool:
    job = site.job(job_id)
    return job is not None and job.is_ended
