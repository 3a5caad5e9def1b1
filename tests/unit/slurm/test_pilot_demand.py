"""Which pilots are proposed for pending jobs."""

from __future__ import annotations

import pytest

from scheduler.domain.decisions import ReasonCode
from scheduler.slurm.pilot_demand import (
    PendingJob,
    PilotLimits,
    PilotProposal,
    PilotSupply,
    count_coming_nodes,
    propose_pilots,
    select_startable_jobs,
)
from scheduler.slurm.slurm_client import SlurmJob

LIMITS = PilotLimits(nodes_max=4, gpus_per_node=8)


def a_pilot(state: str, nodes: int = 1, *, job_id: str = "1") -> SlurmJob:
    return SlurmJob(job_id, "ebbtide-training", state, nodes, None, "")


def a_job(min_gpus: int, reason: ReasonCode = ReasonCode.INSUFFICIENT_GPUS, *, queue: str = "default") -> PendingJob:
    return PendingJob(queue, min_gpus, reason)


@pytest.mark.parametrize(
    ("min_gpus", "free_gpus", "coming", "submitted", "pilots", "wanted"),
    [
        ([], 0, 0, 0, (), ()),
        ([8], 0, 0, 0, (1,), (1,)),
        ([4, 4, 4], 0, 0, 0, (1, 1), (1, 1)),
        ([8], 8, 0, 0, (), ()),
        ([6, 6], 4, 0, 0, (1,), (1,)),
        ([8], 0, 1, 1, (), ()),
        ([8, 8], 0, 1, 1, (1,), (1,)),
        ([8], 0, 0, 1, (1,), (1,)),
        ([8], 0, 0, 4, (), (1,)),
    ],
)
def test_nodes_cover_missing_gpus_within_the_cap(
    min_gpus: list[int], free_gpus: int, coming: int, submitted: int, pilots: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    proposal = propose_pilots(map(a_job, min_gpus), PilotSupply(free_gpus, coming, submitted), LIMITS)
    assert proposal == PilotProposal(pilots, wanted, sum(min_gpus))


@pytest.mark.parametrize(
    ("min_gpus", "free_gpus", "coming", "submitted", "pilots", "wanted"),
    [
        ([16], 0, 0, 0, (2,), (2,)),
        ([16], 8, 0, 1, (2,), (2,)),
        ([16], 8, 1, 2, (), ()),
        ([17, 7, 8], 0, 0, 0, (3, 1), (3, 1)),
        ([16, 8], 0, 0, 0, (2, 1), (2, 1)),
        ([16, 8], 0, 0, 3, (), (2, 1)),
        ([8, 16], 0, 0, 3, (1,), (1, 2)),
    ],
)
def test_job_of_several_nodes_gets_them_from_one_pilot(
    min_gpus: list[int], free_gpus: int, coming: int, submitted: int, pilots: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    proposal = propose_pilots(map(a_job, min_gpus), PilotSupply(free_gpus, coming, submitted), LIMITS)
    assert (proposal.pilots, proposal.wanted) == (pilots, wanted)


def test_free_gpus_do_not_count_for_a_job_whose_placement_on_them_failed() -> None:
    job = a_job(8, ReasonCode.TOPOLOGY_PLACEMENT_FAILED)
    assert propose_pilots([job], PilotSupply(8, 0, 0), LIMITS).pilots == (1,)
    assert propose_pilots([job], PilotSupply(8, 1, 1), LIMITS).pilots == ()
    assert propose_pilots([job, a_job(8)], PilotSupply(8, 0, 0), LIMITS).pilots == (1,)


@pytest.mark.parametrize(
    ("pilots", "machines", "coming"),
    [
        ([a_pilot("PENDING", 2)], [], 2),
        ([a_pilot("RUNNING", 2)], [], 2),
        ([a_pilot("RUNNING", 2)], ["slurm-1-n1"], 1),
        ([a_pilot("RUNNING", 2)], ["slurm-1-n1", "slurm-1-n2", "slurm-1-n-3"], 0),
        ([a_pilot("RUNNING"), a_pilot("CONFIGURING", job_id="17")], ["slurm-1-n1", "slurm-171-n1", "m0"], 1),
        ([a_pilot("COMPLETING")], [], 0),
    ],
)
def test_nodes_of_pilots_come_until_they_have_joined(pilots: list[SlurmJob], machines: list[str], coming: int) -> None:
    assert count_coming_nodes(pilots, machines) == coming


@pytest.mark.parametrize(
    ("jobs", "headroom", "selected"),
    [
        ([a_job(8)], {}, [8]),
        ([a_job(33), a_job(8)], {}, [8]),
        ([a_job(8), a_job(16, queue="vision"), a_job(4, queue="vision")], {"vision": 8}, [8, 4]),
        ([a_job(8, queue="vision"), a_job(8, queue="vision")], {"vision": 8}, [8]),
        ([a_job(8), a_job(4, ReasonCode.BEHIND_HEAD_OF_QUEUE)], {}, [8, 4]),
        ([a_job(4, ReasonCode.BEHIND_HEAD_OF_QUEUE)], {}, []),
        ([a_job(33), a_job(4, ReasonCode.BEHIND_HEAD_OF_QUEUE)], {}, []),
    ],
)
def test_jobs_that_no_pilot_can_start_are_left_out(
    jobs: list[PendingJob], headroom: dict[str, int], selected: list[int]
) -> None:
    assert [job.min_gpus for job in select_startable_jobs(jobs, LIMITS, headroom)] == selected
