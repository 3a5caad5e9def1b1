"""Collectives: ring, tree and hierarchical times computed by hand, and measured tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.solver.costs.collectives import (
    ProcessGroups,
    StageSetting,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    send_s,
)
from scheduler.solver.profiles.catalog import load_gpu
from scheduler.solver.profiles.hardware_profile import Collective, CollectiveTable, HardwareProfile

PLAIN = replace(
    load_gpu("a100-80g"),
    intra_bandwidth_bytes_per_s=100e9,
    intra_latency_s=1e-5,
    intra_hop_s=1e-6,
    inter_bandwidth_bytes_per_s=10e9,
    inter_latency_s=5e-5,
    inter_hop_s=4e-6,
)


def _groups(ranks: int, stride: int = 1, *, gpus: int = 64, hardware: HardwareProfile = PLAIN) -> ProcessGroups:
    setting = StageSetting.for_stage(hardware, node_gpus=8, gpus=gpus, global_batch=64)
    return ProcessGroups.for_ranks(np.array([ranks]), np.array([stride]), setting)


def _uneven(hardware: HardwareProfile = PLAIN) -> ProcessGroups:
    """Data parallelism over 5 + 3 GPUs."""
    setting = StageSetting.for_stage(hardware, node_gpus=1, gpus=8, global_batch=64, node_gpus_min=3)
    return ProcessGroups.for_ranks(np.array([8]), np.array([1]), setting, spanning=True)


def _one(size_bytes: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([size_bytes])


def test_ring_within_a_node_and_all_reduce_of_twice_its_time() -> None:
    gather_s = 1e-5 + 3 * 1e-6 + 3 / 4 * 4e9 / 100e9
    assert all_gather_s(_one(4e9), _groups(4)) == pytest.approx(gather_s)
    assert all_reduce_s(_one(4e9), _groups(4)) == pytest.approx(2 * gather_s)


def test_ranks_of_a_node_share_its_network_ports() -> None:
    """Large messages. 16 ranks on 2 nodes have 8 ports of 10 GB/s; one rank per node has one port."""
    assert all_gather_s(_one(16e9), _groups(16)) == pytest.approx(15 / 16 * 16e9 / 80e9, rel=1e-2)
    assert all_gather_s(_one(8e9), _groups(8, stride=8)) == pytest.approx(7 / 8 * 8e9 / 10e9, rel=1e-2)


def test_ring_on_uneven_nodes_uses_the_ports_of_the_smallest_node() -> None:
    assert all_gather_s(_one(8e9), _uneven()) == pytest.approx(7 / 8 * 8e9 / 30e9, rel=1e-2)


def test_gpus_that_share_a_network_port_share_its_bandwidth() -> None:
    """Large messages. With two GPUs per port, a node of 8 has 4 ports, and the 3 GPUs of an uneven node have 2."""
    pairs = replace(PLAIN, gpus_per_nic=2)
    layered_s = 1 / 16 * 16e9 / 5e9 + 7 / 8 * 16e9 / 100e9
    assert all_gather_s(_one(16e9), _groups(16, hardware=pairs)) == pytest.approx(layered_s, rel=1e-2)
    assert all_gather_s(_one(8e9), _groups(8, 8, hardware=pairs)) == pytest.approx(7 / 8 * 8e9 / 5e9, rel=1e-2)
    assert all_gather_s(_one(8e9), _uneven(pairs)) == pytest.approx(7 / 8 * 8e9 / 20e9, rel=1e-2)
    assert send_s(_one(1e9), np.array([True]), pairs, 2) == pytest.approx(1e9 / 5e9, rel=1e-2)
    assert send_s(_one(1e9), np.array([True]), pairs, 1) == pytest.approx(1e9 / 10e9, rel=1e-2)


def test_small_messages_over_many_nodes_use_the_tree() -> None:
    tree_s = 2 * (5e-5 + 7 * 1e-6 + 3 * 4e-6)
    assert all_reduce_s(_one(8.0), _groups(64)) == pytest.approx(tree_s, rel=1e-3)
    assert all_gather_s(_one(8.0), _groups(64)) == pytest.approx(5e-5 + 7 * 1e-6 + 7 * 4e-6, rel=1e-3)


def test_all_to_all_across_nodes_uses_the_network() -> None:
    inside, across = 7 / 16 * 16e9 / 100e9, 8 / 16 * 16e9 / 10e9
    assert all_to_all_s(_one(16e9), _groups(16)) == pytest.approx(inside + across, rel=1e-3)


def test_single_rank_and_empty_message_are_free() -> None:
    for collective in (all_gather_s, all_reduce_s, all_to_all_s):
        assert collective(_one(1e9), _groups(1)) == 0.0
        assert collective(_one(0.0), _groups(8)) == 0.0


def test_group_that_does_not_divide_nodes_counts_as_spread() -> None:
    assert _groups(3, gpus=6).ranks_per_node == 1  # Nodes of gcd(8, 6) = 2
    assert _groups(2, stride=3, gpus=24).ranks_per_node == 1


def test_message_to_another_node_uses_the_network() -> None:
    times_s = send_s(_one(1e9), np.array([False, True]), PLAIN, 1)
    assert times_s == pytest.approx([1e-5 + 0.01, 5e-5 + 0.1])


def test_measured_times_replace_the_formula() -> None:
    table = CollectiveTable(Collective.ALL_REDUCE, 4, ((1e6, 1e-3), (1e9, 0.5)))
    measured = replace(PLAIN, collectives=(table,))
    four = _groups(4, hardware=measured)
    assert all_reduce_s(_one(1e6), four) == pytest.approx(1e-3)
    assert all_gather_s(_one(1e6), four) == pytest.approx(0.5e-3)
    assert all_reduce_s(_one(2e9), four) == pytest.approx(1.0)  # Beyond the table, time grows in proportion.
    assert all_reduce_s(_one(1e6), _groups(2, hardware=measured)) == all_reduce_s(_one(1e6), _groups(2))


def test_times_measured_within_a_node_do_not_hold_between_nodes() -> None:
    tables = tuple(CollectiveTable(Collective.ALL_REDUCE, ranks, ((1e6, 1e-9), (1e9, 1e-6))) for ranks in (4, 16))
    measured = replace(PLAIN, collectives=tables)
    for ranks in (4, 16):
        assert all_reduce_s(_one(1e6), _groups(ranks, hardware=measured)) == pytest.approx(1e-9)
    apart = all_reduce_s(_one(1e6), _groups(4, stride=8, hardware=measured))
    assert apart == all_reduce_s(_one(1e6), _groups(4, stride=8)) > 1e-6


def test_measured_times_hold_for_many_messages_of_one_group() -> None:
    table = CollectiveTable(Collective.ALL_REDUCE, 4, ((1e6, 1e-3), (1e9, 0.5)))
    four = _groups(4, hardware=replace(PLAIN, collectives=(table,)))
    sizes = np.array([[1e6, 1e9, 0.0]])
    assert all_reduce_s(sizes, four) == pytest.approx(np.array([[1e-3, 0.5, 0.0]]))


@pytest.mark.parametrize("field", ["intra_bandwidth_bytes_per_s", "inter_bandwidth_bytes_per_s"])
def test_more_bandwidth_never_takes_longer(field: str) -> None:
    faster = replace(PLAIN, **{field: 4 * getattr(PLAIN, field)})
    for ranks in (2, 8, 16, 64):
        for size in (1.0, 1e5, 1e9):
            for collective in (all_gather_s, all_reduce_s, all_to_all_s):
                assert collective(_one(size), _groups(ranks, hardware=faster)) <= collective(_one(size), _groups(ranks))
