"""Changes of the fleet: a checkpoint and the changes since then give the state of the last commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.fleet import LoanState, NodeState
from scheduler.domain.job import Intent
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling import past_changes, past_fleet
from scheduler.scheduling.past_changes import (
    FleetChange,
    compute_fleet_change,
    decode_fleet_change,
    encode_fleet_change,
    replay_changes,
)
from scheduler.scheduling.past_fleet import capture_fleet
from tests.builders import a_fleet, a_job, a_loan, a_node, a_snapshot

NAMED_MAX = 3


@pytest.fixture(autouse=True, scope="module")
def checkpoints_with_few_names() -> Iterator[None]:
    """Let checkpoints name few of the pending jobs, so that replays begin without the others."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (past_changes, past_fleet):
            patch.setattr(module, "PENDING_JOBS_MAX", NAMED_MAX)
        yield


@st.composite
def courses(draw: st.DrawFn) -> Sequence[Snapshot]:
    """Return snapshots of one fleet, each with random changes of nodes, loans and jobs since the one before."""
    snapshots = [replace(a_snapshot(a_fleet(training=2, inference=2)), generation=1, now_s=100.0)]
    for step in range(draw(st.integers(1, 6))):
        before = snapshots[-1]
        nodes, jobs, loans = dict(before.nodes), dict(before.jobs), dict(before.loans)
        for _ in range(draw(st.integers(0, 3))):
            name = draw(st.sampled_from(["t0", "t1", "i0", "i1", "t9"]))
            pool = "training" if name[0] == "t" else "inference"
            if draw(st.booleans()):
                nodes[name] = a_node(
                    name, pool, state=draw(st.sampled_from(NodeState)), cordoned=draw(st.booleans()),
                    inference_gpus=draw(st.integers(0, 8)),
                )  # fmt: skip
            elif name == "t9":
                nodes.pop(name, None)
        for name in ("i0", "i1"):
            state = draw(st.sampled_from([None, LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED]))
            if state is None:
                loans.pop(name, None)
            elif draw(st.booleans()):
                loans[name] = a_loan(name, state)
        for at in draw(st.sets(st.integers(0, 7), max_size=4)):
            job = a_job(f"j{at}", draw(st.integers(1, 4)), now_s=float(at), queue=draw(st.sampled_from(["a", "b"])))
            if draw(st.booleans()):
                node = draw(st.sampled_from(["t0", "t1", "i0", "i1"]))
                job = a_job(f"j{at}", 1, state=JobState.RUNNING, on={node: (at,)}, now_s=float(at))
            jobs[job.id] = replace(job, intent=draw(st.sampled_from(Intent)))
            if draw(st.integers(0, 3)) == 0:
                del jobs[job.id]
        snapshots.append(replace(before, nodes=nodes, jobs=jobs, loans=loans, generation=step + 2, now_s=101.0 + step))
    return snapshots


@given(courses())
@settings(max_examples=300)
def test_checkpoint_and_changes_give_the_state(course: Sequence[Snapshot]) -> None:
    changes = [compute_fleet_change(before, after) for before, after in pairwise(course)]
    stored = [decode_fleet_change(encode_fleet_change(each)) for each in changes if not each.is_empty]
    past, truth = replay_changes(capture_fleet(course[0], 0), stored), capture_fleet(course[-1], 0)
    assert past.has_same_content(truth)
    for first, snapshot in enumerate(course):
        later = [each for each in stored if each.generation > snapshot.generation]
        past = replay_changes(capture_fleet(snapshot, 0), later)
        assert (past.nodes, past.holding) == (truth.nodes, truth.holding), first
        assert past.pending_by_queue == truth.pending_by_queue
        assert past.pending == truth.pending[: len(past.pending)], "the oldest ones are named, none of them is missing"


def test_snapshots_that_differ_in_progress_only_change_nothing() -> None:
    before = a_snapshot(
        a_fleet(training=1, inference=1), [a_job("w", 2), a_job("r", state=JobState.RUNNING, on={"t0": (0,)})]
    )
    jobs = {job.id: replace(job, message="runs") for job in before.jobs.values()}
    after = replace(before, jobs=jobs, generation=2, now_s=50.0)
    assert compute_fleet_change(before, after) == FleetChange(50.0, 2)
    assert compute_fleet_change(before, after).is_empty
