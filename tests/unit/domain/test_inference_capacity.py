"""GPUs that inference can use, beside loans, cordoned nodes and nodes that are down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.fleet import Loan, LoanState, Node, NodeState
from scheduler.domain.snapshot import Snapshot
from tests.builders import a_fleet, a_loan, a_snapshot

DOWN = NodeState.DOWN
POOLS, FLEET = a_fleet(training=1, inference=3)


def world(loan: LoanState | None = None, **changes: Any) -> Snapshot:
    """Three inference nodes of 8 GPUs. The first one has the given loan and changes."""
    nodes = {**FLEET, "i0": replace(FLEET["i0"], **changes)}
    return a_snapshot((POOLS, nodes), loans=[] if loan is None else [a_loan("i0", loan, return_by_s=9.0)])


@pytest.mark.parametrize(
    ("snapshot", "capacity"),
    [
        (world(), 24),
        (world(LoanState.OFFERED), 24),
        (world(LoanState.ACTIVE), 16),
        (world(LoanState.RECALLED), 16),
        (world(state=DOWN), 16),
        (world(LoanState.ACTIVE, state=DOWN), 16),
        (world(inference_gpus=5), 24),
        (world(cordoned=True, inference_gpus=5), 21),
        (world(cordoned=True, draining=True, inference_gpus=5), 16),
        (world(LoanState.OFFERED, cordoned=True, inference_gpus=5), 21),
        (world(LoanState.ACTIVE, cordoned=True), 16),
        (world(LoanState.ACTIVE, cordoned=True, state=DOWN), 16),
        (world(cordoned=True, state=DOWN, inference_gpus=5), 16),
    ],
)
def test_unavailable_gpu_is_subtracted_once(snapshot: Snapshot, capacity: int) -> None:
    assert snapshot.index.inference_capacity["inference"] == capacity
    assert world().index.derive_for(snapshot).inference_capacity["inference"] == capacity


NODES = st.builds(
    lambda **changes: replace(FLEET["i0"], **changes),
    gpus=st.integers(1, 8),
    state=st.sampled_from(NodeState),
    cordoned=st.booleans(),
    draining=st.booleans(),
    inference_gpus=st.integers(0, 9),
)
LOANS = st.none() | st.sampled_from([LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED])


def expected_capacity(node: Node, loan: Loan | None) -> int:
    """The GPUs of one node that inference can use."""
    if node.state is DOWN or (loan is not None and loan.state is not LoanState.OFFERED):
        return 0
    if not node.cordoned:
        return node.gpus
    return 0 if node.draining else min(node.gpus, node.inference_gpus)


@given(st.lists(st.tuples(NODES, LOANS), max_size=6))
def test_capacity_is_the_sum_over_all_nodes(drawn: list[tuple[Node, LoanState | None]]) -> None:
    named = [(replace(node, name=f"i{at}"), loan) for at, (node, loan) in enumerate(drawn)]
    loans = {node.name: a_loan(node.name, loan, return_by_s=9.0) for node, loan in named if loan is not None}
    snapshot = a_snapshot((POOLS, {node.name: node for node, _ in named}), loans=loans.values())
    assert snapshot.index.inference_capacity.get("inference", 0) == sum(
        expected_capacity(node, loans.get(node.name)) for node, _ in named
    )
