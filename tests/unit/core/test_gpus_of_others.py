"""GPUs that others use are none of ours to give, whoever they are."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.absorb import absorb
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.observation import NodeFacts, Observation
from scheduler.domain.snapshot import Snapshot

WORLD = Snapshot(
    pools={"training": Pool("training", PoolKind.TRAINING)},
    nodes={"t0": Node("t0", "training", "h100-80g", 8, 80 * 2**30)},
)


def seen(other_gpus: int) -> Snapshot:
    observation = Observation(0.0, 0, nodes={"t0": NodeFacts(other_gpus=other_gpus)})
    return absorb(WORLD, observation, ()).snapshot


def test_what_others_use_is_not_free() -> None:
    ledger = seen(3).ledger
    assert ledger.usable_gpus == 5
    assert sum(ledger.serving.values()) == 5
    assert len(ledger.rooms["t0"].free) == 5


def test_a_node_that_others_have_whole_has_no_room() -> None:
    assert "t0" not in seen(8).ledger.rooms
    assert seen(9).ledger.usable_gpus == 0


def test_it_is_free_again_when_they_go() -> None:
    later = absorb(seen(8), Observation(1.0, 0, nodes={"t0": NodeFacts()}), ()).snapshot
    assert later.ledger.usable_gpus == 8
    assert later.ledger.rooms == replace(later, memo=None).ledger.rooms
