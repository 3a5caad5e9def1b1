"""Pools, Queues and nodes of the cluster, as what has to change of the fleet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.documents.refusal import RefusedError
from scheduler.domain.command import (
    ChangeQueue,
    CommandBody,
    CreatePool,
    CreateQueue,
    DeletePool,
    DeleteQueue,
    SetLendingPolicy,
)
from scheduler.domain.fleet import PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.node_intake import Homes, find_homes, node_changes
from scheduler.k8s.resources.conditions import ACCEPTED, Claim
from scheduler.k8s.resources.job_queue import read_queue
from scheduler.k8s.resources.metadata import Resource, metadata
from scheduler.k8s.resources.node import machine
from scheduler.k8s.resources.pool import PoolResource, accepted, read_pool
from scheduler.store.protocol import Loaded


@dataclass(frozen=True, slots=True)
class FleetIntake:
    """`bodies` by what they do, `claims` by the uid of a Pool or Queue, `pools` as they were read, oldest first, and
    `cordoned`: nodes of Pools that the cluster wants cordoned."""

    bodies: Mapping[str, CommandBody] = field(default_factory=dict)
    claims: Mapping[str, tuple[Claim, ...]] = field(default_factory=dict)
    pools: tuple[PoolResource, ...] = ()
    cordoned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _PoolsRead:
    """Pools as they were read, oldest first; `frozen` are the names of those that were refused, whose nodes stay as
    they are, `leaving` of those that are being deleted."""

    pools: tuple[PoolResource, ...]
    frozen: frozenset[str]
    leaving: frozenset[str]
    claims: dict[str, tuple[Claim, ...]]


def take_in_fleet(
    pools: Iterable[Resource], queues: Iterable[Resource], nodes: Iterable[Resource], loaded: Loaded
) -> FleetIntake:
    """What has to change, without what waits in the inbox already."""
    snapshot = loaded.snapshot
    pools = tuple(pools)
    read, queue_claims = _read_pools(pools, snapshot), dict[str, tuple[Claim, ...]]()
    machines = {host.name: host for host in map(machine, nodes)}
    homes = find_homes(read.pools, machines.values(), snapshot, frozen=read.frozen)
    managed = frozenset(pool.pool.name for pool in read.pools) | read.leaving
    memory = frozenset(name for resource in pools for name in _cordoned_before(resource))
    changes = node_changes(homes, machines, snapshot, managed=managed, cordoned_before=memory)
    bodies: dict[str, CommandBody] = {}
    for pool in read.pools:
        bodies |= _pool(pool, snapshot)
    bodies |= changes.bodies
    for name in sorted(read.leaving):
        if name in snapshot.pools and not any(node.pool == name for node in snapshot.nodes.values()):
            bodies[f"delete-pool-{name}"] = DeletePool(name)
    for queue in queues:
        bodies |= _queue(queue, snapshot, queue_claims)
    waiting = [command.body for command in loaded.inbox]
    claims = {**read.claims, **_pool_claims(read.pools, homes), **queue_claims}
    new = {name: body for name, body in bodies.items() if body not in waiting}
    return FleetIntake(new, claims, read.pools, changes.cordoned)


def _read_pools(resources: Iterable[Resource], snapshot: Snapshot) -> _PoolsRead:
    pools, frozen, leaving, claims = list[PoolResource](), set[str](), set[str](), dict[str, tuple[Claim, ...]]()
    for resource in sorted(resources, key=_age):
        meta = metadata(resource)
        if meta.is_deleting:
            leaving.add(meta.name)
            claims[meta.uid] = (_deleting(meta.name, snapshot),)
            continue
        try:
            pool = read_pool(resource)
            _check_kind(pool, snapshot)
        except RefusedError as refused:
            frozen.add(meta.name)
            claims[meta.uid] = (Claim(ACCEPTED, False, "Refused", str(refused)),)
        except _KindError as changed:
            frozen.add(meta.name)
            claims[meta.uid] = (Claim(ACCEPTED, False, "KindChanged", str(changed)),)
        else:
            pools.append(pool)
    return _PoolsRead(tuple(pools), frozenset(frozen), frozenset(leaving), claims)


class _KindError(ValueError):
    """A Pool's kind is another than that of the pool it made."""


def _check_kind(pool: PoolResource, snapshot: Snapshot) -> None:
    present = snapshot.pools.get(pool.pool.name)
    if present is not None and present.kind is not pool.pool.kind:
        raise _KindError(f'kind: got "{pool.pool.kind}"; allowed: {present.kind}, as it was created')


def _age(resource: Resource) -> tuple[str, str]:
    meta = metadata(resource)
    return meta.created_at, meta.name


def _deleting(name: str, snapshot: Snapshot) -> Claim:
    nodes = sorted(node.name for node in snapshot.nodes.values() if node.pool == name)
    if not nodes:
        return Claim(ACCEPTED, False, "Deleting", "its nodes have left")
    return Claim(ACCEPTED, False, "Deleting", f"{len(nodes)} nodes have to be left by their jobs first: {named(nodes)}")


def _cordoned_before(resource: Resource) -> Iterable[str]:
    status = resource.get("status")
    names = status.get("cordonedNodes") if isinstance(status, Mapping) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else ()


def _pool(pool: PoolResource, snapshot: Snapshot) -> dict[str, CommandBody]:
    wanted, name = pool.pool, pool.pool.name
    present = snapshot.pools.get(name)
    if present is None:
        return {f"create-pool-{name}": CreatePool(wanted)}
    if wanted.kind is PoolKind.INFERENCE and present.lending != wanted.lending:
        return {f"set-lending-{name}": SetLendingPolicy(name, wanted.lending)}
    return {}


def _pool_claims(pools: Iterable[PoolResource], homes: Homes) -> dict[str, tuple[Claim, ...]]:
    return {pool.uid: (accepted(), *homes.claims(pool)) for pool in pools}


def _queue(resource: Resource, snapshot: Snapshot, claims: dict[str, tuple[Claim, ...]]) -> dict[str, CommandBody]:
    meta = metadata(resource)
    present = snapshot.queues.get(meta.name)
    if meta.is_deleting:
        return {f"delete-queue-{meta.name}": DeleteQueue(meta.name)} if present is not None else {}
    try:
        queue = read_queue(resource)
    except RefusedError as refused:
        claims[meta.uid] = (Claim(ACCEPTED, False, "Refused", str(refused)),)
        return {}
    claims[meta.uid] = (accepted(),)
    if present is None:
        return {f"create-queue-{meta.name}": CreateQueue(queue)}
    return {f"change-queue-{meta.name}": ChangeQueue(queue)} if present != queue else {}


def named(names: Collection[str]) -> str:
    """The first ten of them, for people."""
    shown = sorted(names)[:10]
    return ", ".join(shown) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
