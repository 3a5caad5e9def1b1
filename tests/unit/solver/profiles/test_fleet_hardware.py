"""Profiles that were set on a service, and networks of its pools, change what this process plans from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.hardware import FleetHardware, NodeNetwork
from scheduler.solver.profiles.catalog import (
    GpuSource,
    ProfileError,
    find_gpu_source,
    list_gpu_names,
    load_gpu,
    load_model,
    read_gpu_json,
)
from scheduler.solver.profiles.fleet_hardware import get_fleet_hardware, use_fleet_hardware, with_slowest_network
from scheduler.solver.profiles.gpu_throughput import list_throughputs
from scheduler.solver.profiles.hardware_profile import Collective, CollectiveTable
from scheduler.solver.request import SolveRequest

GPU = "h100-80g"
SHIPPED = load_gpu(GPU)
TABLES = tuple(CollectiveTable(Collective.ALL_REDUCE, ranks, ((1e6, 1e-3), (1e9, 1e-1))) for ranks in (8, 16))
SLOW = NodeNetwork(SHIPPED.inter_bandwidth_bytes_per_s / 8, 1e-3, 1.0, 8)
FAST = NodeNetwork(SHIPPED.inter_bandwidth_bytes_per_s * 8, 1e-6, 1.0, 8)


def set_profile(name: str, **changes: Any) -> None:
    text = json.dumps({**json.loads(read_gpu_json(GPU)), "gpu": name, **changes})
    use_fleet_hardware(FleetHardware({name: text}))


def test_a_set_profile_takes_precedence_over_the_shipped_one() -> None:
    set_profile(GPU, efficiency=0.5)
    assert (load_gpu(GPU).efficiency, find_gpu_source(GPU)) == (0.5, GpuSource.SET)
    assert find_gpu_source(GPU, is_set_ignored=True) is GpuSource.SHIPPED
    use_fleet_hardware(FleetHardware())
    assert (load_gpu(GPU), find_gpu_source(GPU)) == (SHIPPED, GpuSource.SHIPPED)


def test_plans_leave_the_memory_that_sleeping_replicas_keep() -> None:
    use_fleet_hardware(FleetHardware(kept_bytes={GPU: 3 * 2**30}))
    profile, shape = load_gpu(GPU), GpuShape.packed(GPU, 8, 8)
    assert (profile.memory_bytes, profile.kept_bytes) == (SHIPPED.memory_bytes, 3 * 2**30)
    (group,) = SolveRequest(load_model("gpt2"), (profile,), shape, 64).groups
    assert group.limit_bytes == SHIPPED.memory_bytes - 3 * 2**30
    (smaller,) = SolveRequest(load_model("gpt2"), (profile,), shape, 64, memory_bytes_max=2**30).groups
    assert smaller.limit_bytes == 2**30
    assert load_gpu("l4").kept_bytes == 0


def test_a_set_profile_may_add_a_gpu_model() -> None:
    set_profile("x1-80g")
    assert "x1-80g" in list_gpu_names()
    assert list_throughputs()["x1-80g"] == list_throughputs()[GPU]
    use_fleet_hardware(FleetHardware())
    assert find_gpu_source("x1-80g") is None
    with pytest.raises(ProfileError, match="gpu is 'x1-80g'; allowed are"):
        load_gpu("x1-80g")


def test_the_digests_and_the_throughputs_follow_a_set_profile() -> None:
    throughput = list_throughputs()[GPU]
    set_profile(GPU, efficiency=SHIPPED.efficiency / 2)
    assert get_fleet_hardware().digests.keys() == {GPU}
    assert list_throughputs()[GPU] < throughput
    use_fleet_hardware(FleetHardware())
    assert (get_fleet_hardware().digests, list_throughputs()[GPU]) == ({}, throughput)


def test_plans_use_the_network_of_the_fleet_and_not_of_files() -> None:
    use_fleet_hardware(FleetHardware(networks={GPU: (SLOW,)}))
    assert load_gpu(GPU).inter_bandwidth_bytes_per_s == SLOW.bandwidth_bytes_per_s
    assert json.loads(read_gpu_json(GPU))["inter_bandwidth_bytes_per_s"]["value"] == SHIPPED.inter_bandwidth_bytes_per_s


def test_the_slowest_network_counts() -> None:
    both = with_slowest_network(SHIPPED, (SLOW, FAST))
    assert (both.inter_bandwidth_bytes_per_s, both.inter_latency_s) == (SLOW.bandwidth_bytes_per_s, 1e-3)
    own = with_slowest_network(SHIPPED, (FAST, None))
    assert own == SHIPPED
    faster = with_slowest_network(SHIPPED, (FAST,))
    assert (faster.inter_bandwidth_bytes_per_s, faster.inter_latency_s) == (FAST.bandwidth_bytes_per_s, 1e-6)


def test_shared_ports_make_a_network_slower() -> None:
    shared = NodeNetwork(SHIPPED.inter_bandwidth_bytes_per_s * 2, 1e-6, 4.0, 8)
    assert with_slowest_network(SHIPPED, (shared, None)).gpus_per_nic == 4.0


def test_collectives_measured_across_nodes_do_not_hold_on_another_network() -> None:
    measured = replace(SHIPPED, collectives=TABLES)
    assert with_slowest_network(measured, (SLOW,)).collectives == TABLES[:1]
    assert with_slowest_network(measured, ()).collectives == TABLES
