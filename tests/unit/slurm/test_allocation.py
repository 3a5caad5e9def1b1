"""When an agent leaves its allocation, and what it reads of it."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext

import pytest

from scheduler.slurm.allocation import Allocation, AllocationWatch, DepartureTimes
from scheduler.slurm.slurm_client import SlurmError, SlurmJob

TIMES = DepartureTimes(leave_within_s=20.0, leave_before_s=120.0, idle_s=600.0, check_s=1.0)
ALLOCATION = Allocation("17", "n1", (0, 1))


def running(*, left_s: float | None = 3600.0, state: str = "RUNNING") -> SlurmJob:
    end_s = None if left_s is None else time.time() + left_s
    return SlurmJob("17", "ebbtide-training", state, 2, end_s, "n[1-2]")


def watch_jobs(*answers: SlurmJob | SlurmError | None, times: DepartureTimes = TIMES) -> AllocationWatch:
    """Return a watch that has looked once for each answer."""
    remaining = list(answers)

    def find(job_id: str, node: str) -> SlurmJob | None:
        assert (job_id, node) == ("17", "n1")
        answer = remaining.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    watch = AllocationWatch(ALLOCATION, times, find=find, parent_pid=os.getppid())
    for _ in answers:
        watch.check()
    return watch


def find_reason(watch: AllocationWatch) -> str:
    notice = watch.find_notice(has_ranks=True)
    return "" if notice is None else notice.reason


@pytest.mark.parametrize(
    "answers",
    [
        (),
        (running(),),
        (running(left_s=None),),
        (running(), None),
        (None, running()),
        (running(), *[SlurmError("x")] * 5),
    ],
)
def test_agent_stays_while_the_job_runs_or_its_end_is_not_confirmed(answers: tuple[SlurmJob | None, ...]) -> None:
    assert find_reason(watch_jobs(*answers)) == ""


@pytest.mark.parametrize("last", [None, running(state="COMPLETING"), running(state="NODE_FAIL")])
def test_agent_leaves_when_its_node_is_no_longer_in_the_job(last: SlurmJob | None) -> None:
    assert "Slurm job 17" in find_reason(watch_jobs(running(), last, last))


def test_agent_leaves_before_the_time_limit_also_while_slurmctld_is_away() -> None:
    watch = watch_jobs(running(left_s=100.0), SlurmError("slurmctld is away"))
    notice = watch.find_notice(has_ranks=True)
    assert notice is not None
    assert 80.0 < notice.within_s < 86.0
    assert find_reason(watch_jobs(running(left_s=100.0), running(left_s=3600.0))) == "", "the limit was extended"


def test_ranks_get_no_more_time_than_the_allocation_has_left() -> None:
    notice = watch_jobs(running(left_s=8.0)).find_notice(has_ranks=True)
    assert notice is not None
    assert 1.0 <= notice.within_s <= 8.0


def test_idle_agent_returns_its_node() -> None:
    times = DepartureTimes(leave_within_s=20.0, leave_before_s=120.0, idle_s=0.2, check_s=1.0)
    watch = watch_jobs(running(), times=times)
    assert watch.find_notice(has_ranks=False) is None
    time.sleep(0.25)
    assert watch.find_notice(has_ranks=True) is None
    assert watch.find_notice(has_ranks=False) is None
    time.sleep(0.25)
    assert watch.find_notice(has_ranks=False) is not None


def test_agent_leaves_without_the_process_that_started_it() -> None:
    watch = AllocationWatch(ALLOCATION, TIMES, find=lambda job_id, node: running(), parent_pid=os.getppid() + 1)
    assert "step" in find_reason(watch)


def test_environment_of_a_task_names_node_and_gpus() -> None:
    environment = {
        "SLURM_JOB_ID": "17",
        "SLURMD_NODENAME": "GPU_Node.01",
        "SLURM_JOB_GPUS": "0,1",
        "SLURM_STEP_GPUS": "3",
    }
    allocation = Allocation.read(environment)
    assert allocation == Allocation("17", "GPU_Node.01", (3,))
    assert allocation.machine_name == "slurm-17-gpu-node.01"
    assert Allocation.read({"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1"}).gpus is None


def test_environment_without_a_job_is_rejected() -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_ID"):
        Allocation.read({})


@pytest.mark.parametrize(
    ("gpus", "manages_gpus", "stated_gpus", "remedy"),
    [
        ((0, 1), True, 0, ""),
        ((0, 1), True, 2, ""),
        ((0, 1), True, 3, "--gpus-per-node 3"),
        (None, False, 8, ""),
        (None, True, 0, "--gpus-per-node"),
        (None, True, 8, "--gpus-per-node"),
        (None, False, 0, "--node-gpus"),
    ],
)
def test_gpus_that_slurm_did_not_grant_are_offered_only_where_it_manages_none(
    gpus: tuple[int, ...] | None, manages_gpus: bool, stated_gpus: int, remedy: str
) -> None:
    allocation = Allocation("17", "n1", gpus)
    with pytest.raises(ValueError, match=remedy) if remedy else nullcontext():
        allocation.check_grant(stated_gpus=stated_gpus, manages_gpus=lambda: manages_gpus)
