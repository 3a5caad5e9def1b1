"""What inference has of its pool beside the loans."""

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
    """Three inference nodes of 8, of which the first is changed and on loan."""
    nodes = {**FLEET, "i0": replace(FLEET["i0"], **changes)}
    return a_snapshot((POOLS, nodes), loans=[] if loan is None else [a_loan("i0", loan, return_by_s=9.0)])


@pytest.mark.parametrize(
    ("snapshot", "supply"),
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
def test_a_gpu_is_missing_once_whatever_the_reasons(snapshot: Snapshot, supply: int) -> None:
    assert snapshot.index.inference_capacity["inference"] == supply
    assert world().index.derive_for(snapshot).inference_capacity["inference"] == supply


NODES = st.builds(
    lambda **changes: replace(FLEET["i0"], **changes),
    gpus=st.integers(1, 8),
    state=st.sampled_from(NodeState),
    cordoned=st.booleans(),
    draining=st.booleans(),
    inference_gpus=st.integers(0, 9),
)
LOANS = st.none() | st.sampled_from([LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED])


def has(node: Node, loan: Loan | None) -> int:
    """What inference has of one node."""
    if node.state is DOWN or (loan is not None and loan.state is not LoanState.OFFERED):
        return 0
    if not node.cordoned:
        return node.gpus
    return 0 if node.draining else min(node.gpus, node.inference_gpus)


@given(st.lists(st.tuples(NODES, LOANS), max_size=6))
def test_it_is_the_sum_of_what_it_has_on_each_node(drawn: list[tuple[Node, LoanState | None]]) -> None:
    named = [(replace(node, name=f"i{at}"), loan) for at, (node, loan) in enumerate(drawn)]
    loans = {node.name: a_loan(node.name, loan, return_by_s=9.0) for node, loan in named if loan is not None}
    snapshot = a_snapshot((POOLS, {node.name: node for node, _ in named}), loans=loans.values())
    assert snapshot.index.inference_capacity.get("inference", 0) == sum(
        has(node, loans.get(node.name)) for node, _ in named
    )
