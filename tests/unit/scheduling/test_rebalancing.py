"""Rebalancing: which jobs give up flexible GPUs and which get them."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import ResizeJob
from scheduler.domain.gpu_sets import GpuShape, count
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_node, a_snapshot

EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
FOUR = (0, 1, 2, 3)


def resized(snapshot: Snapshot) -> dict[str, int]:
    decisions = decide(snapshot, load_policy_set("ebbtide")).decisions
    return {d.job_id: count(d.gpus) for d in decisions if isinstance(d, ResizeJob)}


def test_job_below_its_raised_minimum_grows_at_once_or_not_at_all() -> None:
    fleet = a_fleet(training=1, inference=0)
    other = a_job("other", 2, state=JobState.RUNNING, on={"t0": (4, 5)})
    raised = a_job("raised", 8, 8, state=JobState.RUNNING, on={"t0": FOUR})
    assert resized(a_snapshot(fleet, [raised, other])) == {}
    assert resized(a_snapshot(fleet, [raised])) == {"raised": 8}


def test_job_shrinks_to_its_lowered_maximum() -> None:
    fleet = a_fleet(training=1, inference=0)
    assert resized(a_snapshot(fleet, [a_job("j", 1, 2, state=JobState.RUNNING, on={"t0": EIGHT})])) == {"j": 2}


def test_jobs_grow_in_full_passes() -> None:
    fleet = a_fleet(training=1, inference=0)
    job = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR}, steps=10**6)
    assert resized(a_snapshot(fleet, [job], now_s=1000.0, full_pass_at_s=900.0)) == {}
    assert resized(a_snapshot(fleet, [job], now_s=1000.0, full_pass_at_s=700.0)) == {"j": 8}


def test_no_resize_while_resizes_are_frozen() -> None:
    fleet = a_fleet(training=1, inference=0)
    job = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR}, steps=10**6)
    assert resized(a_snapshot(fleet, [job], switches=Switches(resizes_frozen=True))) == {}
    wide = a_job("wide", 1, 8, state=JobState.RUNNING, on={"t0": EIGHT})
    assert resized(a_snapshot(fleet, [wide, a_job("late", 4)], switches=Switches(resizes_frozen=True))) == {}


def test_jobs_shrink_on_the_demanded_gpus_only() -> None:
    pools, nodes = a_fleet(training=1, inference=0)
    nodes = {**nodes, "h0": a_node("h0", gpu="h100-80g")}
    jobs = [
        a_job("a", 1, 8, state=JobState.RUNNING, on={"t0": EIGHT}, steps=10),
        a_job("h", 1, 8, state=JobState.RUNNING, on={"h0": EIGHT}, steps=10**9),
        a_job("late", 4, gpu="h100-80g"),
    ]
    assert resized(a_snapshot((pools, nodes), jobs)) == {"h": 4}


LLAMA: dict[str, object] = {"model": "llama-2-7b", "global_batch": 8, "steps": 10**6}


def lying(*shares: int) -> GpuShape:
    """Return the shape of these numbers of GPUs on several nodes."""
    return GpuShape.from_node_counts((GPU, share) for share in shares)


def grown_over_five_nodes(*solved: tuple[GpuShape, float]) -> dict[str, int]:
    """A job holds 4 GPUs of one node, with 0.25 s a step; the 4 free GPUs are on 4 other nodes. On 8 GPUs of one node
    it would be twice as fast."""
    job = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR}, **LLAMA)  # type: ignore[arg-type]  # a JobSpec's
    others = [a_job(f"o{at}", 7, state=JobState.RUNNING, on={f"t{at}": EIGHT[1:]}) for at in range(1, 5)]
    others.append(a_job("beside", 4, state=JobState.RUNNING, on={"t0": EIGHT[4:]}))
    curves = {job.spec.curve_key: a_curve({lying(8): 0.125, **dict(solved)})}
    return resized(a_snapshot(a_fleet(training=5, inference=0), [job, *others], curves=curves))


def test_job_does_not_grow_onto_gpus_that_slow_it() -> None:
    present, slower = (lying(4), 0.25), (lying(4, 1, 1, 1, 1), 0.3)
    assert grown_over_five_nodes(present, slower) == {}
    assert grown_over_five_nodes(present, slower, (lying(4, 1, 1, 1), 0.24)) == {"j": 7}
    assert grown_over_five_nodes(present, (lying(4, 1, 1, 1, 1), 0.2)) == {"j": 8}


def test_unsolved_present_shape_is_compared_by_its_plan() -> None:
    assert grown_over_five_nodes((lying(4, 1, 1, 1, 1), 0.3)) == {}
    assert grown_over_five_nodes((lying(4, 1, 1, 1, 1), 0.2)) == {"j": 8}


def test_shrinking_job_drops_gpus_that_slow_it() -> None:
    """2 GPUs are demanded; on 6 the job would be slower than on 4, so it gives up 4."""
    job = a_job("j", 2, 8, state=JobState.RUNNING, on={"t0": EIGHT}, **LLAMA)  # type: ignore[arg-type]  # a JobSpec's
    curve = a_curve({lying(2): 10.0, lying(4): 6.0, lying(6): 8.0, lying(8): 4.0})
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job, a_job("late", 2)], curves={job.spec.curve_key: curve})
    assert resized(snapshot) == {"j": 4}


def test_job_gives_up_gpus_if_it_is_faster_without_them() -> None:
    job = a_job("j", 2, 8, state=JobState.RUNNING, on={"t0": EIGHT}, **LLAMA)  # type: ignore[arg-type]  # a JobSpec's
    curve = a_curve({lying(2): 0.1, lying(4): 0.05})  # On eight its plan takes 0.125 s.
    curves = {job.spec.curve_key: curve}
    assert resized(a_snapshot(a_fleet(training=1, inference=0), [job], curves=curves, now_s=1000.0)) == {"j": 4}


def lately(job: Job, started_at_s: float) -> Job:
    return replace(job, account=replace(job.account, first_started_at_s=started_at_s))


def test_shrinking_frees_gpus_for_expected_arrivals() -> None:
    """1 GPU is demanded; two jobs of 1 GPU started in the last five minutes, a third one earlier."""
    wide = a_job("wide", 1, 8, state=JobState.RUNNING, on={"t0": EIGHT[:5]}, steps=10**7)
    small = [a_job(f"s{at}", state=JobState.RUNNING, on={"t0": (at,)}, steps=10**7) for at in (5, 6, 7)]
    starts_s = (100.0, 800.0, 900.0)
    jobs = [lately(job, start_s) for job, start_s in zip(small, starts_s, strict=True)]
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [wide, *jobs, a_job("late", 1)], now_s=1000.0)
    assert resized(snapshot) == {"wide": 2}


def test_growth_leaves_gpus_for_expected_arrivals() -> None:
    wide = a_job("wide", 1, 8, state=JobState.RUNNING, on={"t0": (0, 1)}, steps=10**7)
    small = lately(a_job("small", 3, state=JobState.RUNNING, on={"t0": (2, 3, 4)}, steps=10**7), 900.0)
    assert resized(a_snapshot(a_fleet(training=1, inference=0), [wide, small], now_s=1000.0)) == {}
    before = lately(small, 100.0)
    assert resized(a_snapshot(a_fleet(training=1, inference=0), [wide, before], now_s=1000.0)) == {"wide": 5}
