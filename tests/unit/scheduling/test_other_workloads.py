"""GPUs used by other workloads are not allocated."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.observation import NodeFacts, Observation
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.snapshot_update import update_snapshot

WORLD = Snapshot(
    pools={"training": Pool("training", PoolKind.TRAINING)},
    nodes={"t0": Node("t0", "training", "h100-80g", 8, 80 * 2**30)},
)


def seen(other_gpus: int) -> Snapshot:
    observation = Observation(0.0, 0, nodes={"t0": NodeFacts(other_gpus=other_gpus)})
    return update_snapshot(WORLD, observation, ()).snapshot


def test_gpus_used_by_others_are_not_free() -> None:
    ledger = seen(3).index
    assert ledger.free_gpu_total == 5
    assert sum(ledger.training_gpus.values()) == 5
    assert len(ledger.free_by_node["t0"].indices) == 5


def test_node_fully_used_by_others_has_no_free_gpus() -> None:
    assert "t0" not in seen(8).index.free_by_node
    assert seen(9).index.free_gpu_total == 0


def test_gpus_are_free_after_others_leave() -> None:
    later = update_snapshot(seen(8), Observation(1.0, 0, nodes={"t0": NodeFacts()}), ()).snapshot
    assert later.index.free_gpu_total == 8
    assert later.index.free_by_node == replace(later, cached_index=None).index.free_by_node
