"""Hardware that an admin describes to the service: GPU profiles, and the networks between the nodes of pools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256

from scheduler.domain.fleet import Node, Pool, PoolKind, PoolNetwork


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """A GPU profile that was set on the service, as JSON text. It takes precedence over the shipped one of its name.

    `version` is 1 for a profile that was set for the first time, and increases by 1 whenever it is replaced.
    `set_by` is the display name of the caller.
    """

    name: str
    profile_json: str
    version: int
    set_at_s: float
    set_by: str = ""


@dataclass(frozen=True, slots=True, order=True)
class NodeNetwork:
    """The network of a pool as the nodes of one GPU model use it.

    Args:
        bandwidth_bytes_per_s: of a port, in one direction.
        latency_s: start-up time of a collective or message between nodes.
        gpus_per_nic: GPUs of a node per port, at least 1.
        node_gpus: GPUs of such a node.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    gpus_per_nic: float
    node_gpus: int


@dataclass(frozen=True)
class FleetHardware:
    """Hardware of a fleet that replaces the shipped profiles in its plans.

    Args:
        profiles: JSON text of the profiles that were set, by GPU model.
        networks: the networks that a job on this GPU model may use, by GPU model. None stands for pools that name no
            network, where the profile's own figures hold. GPU models without an entry have no other network.
        kept_bytes: memory of a GPU that sleeping replicas of inference may keep, by GPU model.
    """

    profiles: Mapping[str, str] = field(default_factory=dict)
    networks: Mapping[str, tuple[NodeNetwork | None, ...]] = field(default_factory=dict)
    kept_bytes: Mapping[str, int] = field(default_factory=dict)

    def select_gpus(self, names: Iterable[str]) -> FleetHardware:
        """Return the part about these GPU models."""
        wanted = frozenset(names)
        return FleetHardware(
            {name: text for name, text in self.profiles.items() if name in wanted},
            {name: networks for name, networks in self.networks.items() if name in wanted},
            {name: kept for name, kept in self.kept_bytes.items() if name in wanted},
        )

    @cached_property
    def digest(self) -> str:
        """Digest of the content; empty if there is none."""
        if not self.profiles and not self.networks and not self.kept_bytes:
            return ""
        networks = {
            name: [None if each is None else asdict(each) for each in found] for name, found in self.networks.items()
        }
        content = [dict(self.profiles), networks, *([dict(self.kept_bytes)] if self.kept_bytes else [])]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """Digest of what is known about each GPU model. GPU models without an entry have shipped figures only."""
        return {
            name: self.select_gpus((name,)).digest
            for name in sorted({*self.profiles, *self.networks, *self.kept_bytes})
        }


def collect_fleet_hardware(
    profiles: Mapping[str, GpuProfile], pools: Mapping[str, Pool], nodes: Iterable[Node]
) -> FleetHardware:
    """Return the hardware of a fleet. Any job may use several pools, so all pools that can run jobs count.

    Inference pools that never lend are left out. The result does not depend on which nodes are lent.
    """
    nodes = tuple(nodes)
    found: dict[str, set[NodeNetwork | None]] = {}
    has_networks = any(pool.network for pool in pools.values())
    for node in nodes if has_networks else ():
        pool = pools[node.pool]
        if pool.kind is PoolKind.TRAINING or pool.lending.enabled:
            found.setdefault(node.gpu, set()).add(_to_node_network(pool.network, node.gpus))
    networks = {gpu: each for gpu, each in sorted(found.items()) if each != {None}}
    return FleetHardware(
        {name: profile.profile_json for name, profile in profiles.items()},
        {gpu: (*sorted(filter(None, each)), *([None] if None in each else [])) for gpu, each in networks.items()},
        _collect_kept_bytes(pools, nodes),
    )


def _collect_kept_bytes(pools: Mapping[str, Pool], nodes: Iterable[Node]) -> dict[str, int]:
    """Return the most memory of a GPU that standby replicas keep in any pool that lends, by GPU model.

    Nodes whose GPUs have no more memory than that are never lent, so they do not count.
    """
    by_pool = {
        name: standby.gpu_memory_bytes
        for name, pool in pools.items()
        if (standby := pool.lending.standby) is not None and pool.lending.enabled and standby.gpu_memory_bytes
    }
    kept: dict[str, int] = {}
    for node in nodes if by_pool else ():
        if by_pool.get(node.pool, node.gpu_memory_bytes) < node.gpu_memory_bytes:
            kept[node.gpu] = max(kept.get(node.gpu, 0), by_pool[node.pool])
    return dict(sorted(kept.items()))


def _to_node_network(network: PoolNetwork | None, node_gpus: int) -> NodeNetwork | None:
    """Return the network of nodes with `node_gpus` GPUs. A GPU with several ports uses all of them at once."""
    if network is None:
        return None
    ports_per_gpu = network.nics_per_node / node_gpus
    bandwidth = network.bandwidth_bytes_per_s * max(1.0, ports_per_gpu)
    return NodeNetwork(bandwidth, network.latency_s, max(1.0, 1 / ports_per_gpu), node_gpus)
