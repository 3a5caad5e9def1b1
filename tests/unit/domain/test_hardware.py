"""The hardware of a fleet: networks by GPU model, and what changes its digest."""

from __future__ import annotations

import re

import pytest

from scheduler.domain.fleet import Node, Pool, PoolKind, PoolNetwork
from scheduler.domain.hardware import FleetHardware, GpuProfile, NodeNetwork, collect_fleet_hardware
from scheduler.domain.lending_policy import LendingPolicy

FAST, SLOW = PoolNetwork(20e9, 1e-5, 4), PoolNetwork(2.5e9, 5e-5)
POOLS = {
    "fast": Pool("fast", PoolKind.TRAINING, network=FAST),
    "slow": Pool("slow", PoolKind.TRAINING, network=SLOW),
    "plain": Pool("plain", PoolKind.TRAINING),
    "kept": Pool("kept", PoolKind.INFERENCE, LendingPolicy(enabled=False), SLOW),
    "lent": Pool("lent", PoolKind.INFERENCE, network=SLOW),
}


def collect(*nodes: tuple[str, str, int]) -> FleetHardware:
    """Return the hardware of nodes, each as pool, GPU model and GPUs."""
    made = [Node(f"n{at}", pool, gpu, gpus, 80 * 10**9) for at, (pool, gpu, gpus) in enumerate(nodes)]
    return collect_fleet_hardware({}, POOLS, made)


def test_a_network_belongs_to_the_gpu_models_of_its_pool() -> None:
    found = collect(("fast", "h100-80g", 8), ("plain", "l4", 8))
    assert found.networks == {"h100-80g": (NodeNetwork(20e9, 1e-5, 2.0, 8),)}


def test_a_gpu_model_in_several_pools_has_all_their_networks() -> None:
    found = collect(("fast", "h100-80g", 8), ("slow", "h100-80g", 8), ("plain", "h100-80g", 8))
    assert found.networks["h100-80g"] == (NodeNetwork(2.5e9, 5e-5, 8.0, 8), NodeNetwork(20e9, 1e-5, 2.0, 8), None)


def test_a_gpu_uses_all_ports_of_its_node() -> None:
    assert collect(("fast", "l4", 1)).networks == {"l4": (NodeNetwork(80e9, 1e-5, 1.0, 1),)}


def test_pools_that_never_run_jobs_do_not_count() -> None:
    assert collect(("kept", "h100-80g", 8)).networks == {}
    assert collect(("lent", "h100-80g", 8)).networks.keys() == {"h100-80g"}


def test_the_digest_follows_profiles_and_networks() -> None:
    profile = GpuProfile("l4", "{}", 1, 0.0, "ada")
    empty, set_once = FleetHardware(), collect_fleet_hardware({"l4": profile}, {}, ())
    networked = collect(("fast", "l4", 1))
    assert (empty.digest, collect(("plain", "l4", 8)).digest) == ("", "")
    assert len({empty.digest, set_once.digest, networked.digest, FleetHardware({"l4": "[]"}).digest}) == 4
    assert set_once.select_gpus(["h100-80g"]) == empty


def test_each_gpu_model_has_a_digest_of_its_own() -> None:
    both = FleetHardware({"l4": "{}"}, collect(("fast", "h100-80g", 8)).networks)
    assert both.digests.keys() == {"l4", "h100-80g"}
    changed = FleetHardware({"l4": "[]"}, both.networks)
    assert changed.digests["h100-80g"] == both.digests["h100-80g"]
    assert changed.digests["l4"] != both.digests["l4"]
    assert FleetHardware().digests == {}


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ((0.0, 1e-5, 1), "network.bandwidth_bytes_per_s must be 1000 to 1e+14 bytes/s, got 0.0"),
        ((1e9, 0.0, 1), "network.latency_s must be above 0 and at most 60 s, got 0.0"),
        ((1e9, 1e-5, 0), "network.nics_per_node must be 1 to 1024, got 0"),
    ],
)
def test_an_impossible_network_is_refused(network: tuple[float, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PoolNetwork(*network)
