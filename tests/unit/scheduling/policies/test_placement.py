"""Placement on specific GPUs."""

from __future__ import annotations

from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policies.placement import best_fit, filter_usable
from tests.builders import a_fleet, a_job, a_loan, a_node, a_snapshot

EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
FOUR = (0, 1, 2, 3)


def world(*jobs: Job, training: int = 2, lent: int = 0) -> Snapshot:
    loans = [a_loan(f"i{at}") for at in range(lent)]
    return a_snapshot(a_fleet(training=training, inference=lent), jobs, loans)


def placed(snapshot: Snapshot, job: Job, count: int) -> Gpus | None:
    return best_fit(snapshot, MutableSnapshot(snapshot).free_gpus, job, count)


def busy(on: Gpus) -> Job:
    return a_job("busy", sum(map(len, on.values())), state=JobState.RUNNING, on=on)


def test_tightest_fitting_node_is_used() -> None:
    snapshot = world(busy({"t1": (0, 1, 2, 3, 4)}))
    assert placed(snapshot, a_job("j", 3), 3) == {"t1": (5, 6, 7)}
    assert placed(snapshot, a_job("j", 4), 4) == {"t0": FOUR}


def test_large_job_takes_whole_nodes_first() -> None:
    snapshot = world(busy({"t1": (0, 1)}), training=3)
    assert placed(snapshot, a_job("j", 16), 16) == {"t0": EIGHT, "t2": EIGHT}
    assert placed(snapshot, a_job("j", 14), 14) == {"t0": EIGHT, "t1": (2, 3, 4, 5, 6, 7)}


def test_missing_gpus_give_no_placement() -> None:
    assert placed(world(), a_job("j", 17), 17) is None


def test_base_prefers_owned_nodes_and_flexible_workers_lent_ones() -> None:
    snapshot = world(training=1, lent=1)
    assert placed(snapshot, a_job("j", 4), 4) == {"t0": FOUR}
    grown = a_job("j", 4, 8, state=JobState.RUNNING, on={"t0": FOUR})
    assert placed(world(grown, training=1, lent=1), grown, 4) == {"i0": FOUR}


def test_base_spills_over_to_lent_nodes() -> None:
    assert placed(world(training=1, lent=1), a_job("j", 12), 12) == {"t0": EIGHT, "i0": FOUR}


def test_non_fungible_job_avoids_lent_nodes() -> None:
    snapshot = world(training=1, lent=1)
    fixed = a_job("j", 12, fungible=False)
    assert [room.node for room in filter_usable(fixed, MutableSnapshot(snapshot).free_gpus)] == ["t0"]
    assert placed(snapshot, fixed, 12) is None


def test_job_gets_gpus_of_one_model() -> None:
    pools, nodes = a_fleet(training=1, inference=0)
    snapshot = a_snapshot((pools, {**nodes, "h0": a_node("h0", gpu="h100-80g", gpus=4)}))
    assert placed(snapshot, a_job("j", 12), 12) is None
    assert placed(snapshot, a_job("any", 4), 4) == {"t0": FOUR}
    assert placed(snapshot, a_job("picky", 4, gpu="h100-80g"), 4) == {"h0": FOUR}
    grown = a_job("j", 2, 8, state=JobState.RUNNING, on={"h0": (0, 1)})
    assert best_fit(snapshot, MutableSnapshot(a_snapshot((pools, snapshot.nodes), [grown])).free_gpus, grown, 2) == {
        "h0": (2, 3)
    }
