"""Flexible GPUs: who gives them up, who gets them."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import ResizeJob
from scheduler.domain.gpu_sets import GpuShape, count
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.scheduling.policies.policy_set import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_node, a_snapshot

EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
FOUR = (0, 1, 2, 3)


def resized(snapshot: Snapshot) -> dict[str, int]:
    decisions = decide(snapshot, load_policy_set("ebbtide")).decisions
    return {d.job_id: count(d.gpus) for d in decisions if isinstance(d, ResizeJob)}


def test_a_job_below_its_raised_minimum_waits_until_all_of_it_fits() -> None:
    fleet = a_fleet(training=1, inference=0)
    other = a_job("other", 2, state=JobState.RUNNING, on={"t0": (4, 5)})
    raised = a_job("raised", 8, 8, state=JobState.RUNNING, on={"t0": FOUR})
    assert resized(a_snapshot(fleet, [raised, other])) == {}
    assert resized(a_snapshot(fleet, [raised])) == {"raised": 8}


def test_a_job_above_its_lowered_maximum_shrinks_to_it() -> None:
    fleet = a_fleet(training=1, inference=0)
    assert resized(a_snapshot(fleet, [a_job("j", 1, 2, state=JobState.RUNNING, on={"t0": EIGHT})])) == {"j": 2}


def test_only_a_full_pass_grows_jobs() -> None:
    fleet = a_fleet(training=1, inference=0)
    job = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR}, steps=10**6)
    assert resized(a_snapshot(fleet, [job], now_s=1000.0, full_pass_at_s=900.0)) == {}
    assert resized(a_snapshot(fleet, [job], now_s=1000.0, full_pass_at_s=700.0)) == {"j": 8}


def test_nothing_grows_or_makes_room_while_resizes_are_frozen() -> None:
    fleet = a_fleet(training=1, inference=0)
    job = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR}, steps=10**6)
    assert resized(a_snapshot(fleet, [job], switches=Switches(resizes_frozen=True))) == {}
    wide = a_job("wide", 1, 8, state=JobState.RUNNING, on={"t0": EIGHT})
    assert resized(a_snapshot(fleet, [wide, a_job("late", 4)], switches=Switches(resizes_frozen=True))) == {}


def test_room_is_made_by_jobs_on_the_gpus_that_are_waited_for() -> None:
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
    """The shape of so many GPUs on each of several nodes."""
    return GpuShape.from_node_counts((GPU, share) for share in shares)


def grown_over_five_nodes(*solved: tuple[GpuShape, float]) -> dict[str, int]:
    """A job has four GPUs of one node, its plan takes 0.25 s. The four that are free lie on four other nodes; on
    eight of one node it would be twice as fast."""
    job = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR}, **LLAMA)  # type: ignore[arg-type]  # a JobSpec's
    others = [a_job(f"o{at}", 7, state=JobState.RUNNING, on={f"t{at}": EIGHT[1:]}) for at in range(1, 5)]
    others.append(a_job("beside", 4, state=JobState.RUNNING, on={"t0": EIGHT[4:]}))
    curves = {job.spec.curve_key: a_curve({lying(8): 0.125, **dict(solved)})}
    return resized(a_snapshot(a_fleet(training=5, inference=0), [job, *others], curves=curves))


def test_a_job_does_not_grow_into_gpus_that_lie_so_that_they_slow_it() -> None:
    present, slower = (lying(4), 0.25), (lying(4, 1, 1, 1, 1), 0.3)
    assert grown_over_five_nodes(present, slower) == {}
    assert grown_over_five_nodes(present, slower, (lying(4, 1, 1, 1), 0.24)) == {"j": 7}
    assert grown_over_five_nodes(present, (lying(4, 1, 1, 1, 1), 0.2)) == {"j": 8}


def test_a_job_whose_present_shape_is_not_on_the_curve_is_compared_with_its_plan() -> None:
    assert grown_over_five_nodes((lying(4, 1, 1, 1, 1), 0.3)) == {}
    assert grown_over_five_nodes((lying(4, 1, 1, 1, 1), 0.2)) == {"j": 8}


def test_a_job_that_makes_room_does_not_keep_what_slows_it() -> None:
    """Two GPUs are wanted; on six the job would be slower than on four, so it gives four."""
    job = a_job("j", 2, 8, state=JobState.RUNNING, on={"t0": EIGHT}, **LLAMA)  # type: ignore[arg-type]  # a JobSpec's
    curve = a_curve({lying(2): 10.0, lying(4): 6.0, lying(6): 8.0, lying(8): 4.0})
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [job, a_job("late", 2)], curves={job.spec.curve_key: curve})
    assert resized(snapshot) == {"j": 4}


def test_a_job_that_is_much_faster_on_fewer_gpus_gives_the_others_back() -> None:
    job = a_job("j", 2, 8, state=JobState.RUNNING, on={"t0": EIGHT}, **LLAMA)  # type: ignore[arg-type]  # a JobSpec's
    curve = a_curve({lying(2): 0.1, lying(4): 0.05})  # On eight its plan takes 0.125 s.
    curves = {job.spec.curve_key: curve}
    assert resized(a_snapshot(a_fleet(training=1, inference=0), [job], curves=curves, now_s=1000.0)) == {"j": 4}


def lately(job: Job, started_at_s: float) -> Job:
    return replace(job, account=replace(job.account, first_started_at_s=started_at_s))


def test_room_for_as_many_arrivals_as_lately_is_made_at_once() -> None:
    """One GPU is wanted; two jobs of one GPU have started in the last five minutes, a third before."""
    wide = a_job("wide", 1, 8, state=JobState.RUNNING, on={"t0": EIGHT[:5]}, steps=10**7)
    small = [a_job(f"s{at}", state=JobState.RUNNING, on={"t0": (at,)}, steps=10**7) for at in (5, 6, 7)]
    starts_s = (100.0, 800.0, 900.0)
    jobs = [lately(job, start_s) for job, start_s in zip(small, starts_s, strict=True)]
    snapshot = a_snapshot(a_fleet(training=1, inference=0), [wide, *jobs, a_job("late", 1)], now_s=1000.0)
    assert resized(snapshot) == {"wide": 2}


def test_a_running_job_does_not_grow_into_gpus_that_arrivals_will_want() -> None:
    wide = a_job("wide", 1, 8, state=JobState.RUNNING, on={"t0": (0, 1)}, steps=10**7)
    small = lately(a_job("small", 3, state=JobState.RUNNING, on={"t0": (2, 3, 4)}, steps=10**7), 900.0)
    assert resized(a_snapshot(a_fleet(training=1, inference=0), [wide, small], now_s=1000.0)) == {}
    before = lately(small, 100.0)
    assert resized(a_snapshot(a_fleet(training=1, inference=0), [wide, before], now_s=1000.0)) == {"wide": 5}
