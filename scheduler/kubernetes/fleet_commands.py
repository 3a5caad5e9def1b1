"""Commands that bring the fleet in line with the Pools, Queues, GpuProfiles and nodes of the cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.documents.document import InvalidDocumentError
from scheduler.domain.commands import (
    ChangeQueue,
    CommandBody,
    CreatePool,
    CreateQueue,
    DeleteGpuProfile,
    DeletePool,
    DeleteQueue,
    SetGpuProfile,
    SetLendingPolicy,
    SetPoolNetwork,
    SetServedModels,
)
from scheduler.domain.fleet import PoolKind
from scheduler.domain.gpu_users import describe_gpu_users
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.pool_membership import PoolMembership, assign_nodes, compute_node_commands
from scheduler.kubernetes.resources.fleet import (
    PoolResource,
    build_accepted_condition,
    parse_cluster_node,
    parse_pool,
    parse_queue,
)
from scheduler.kubernetes.resources.gpu_profile import is_equal_profile, parse_gpu_profile
from scheduler.kubernetes.resources.meta import ACCEPTED, Condition, Resource, parse_metadata
from scheduler.solver.profiles.catalog import ProfileError, find_gpu_source
from scheduler.store.protocol import LoadedState


@dataclass(frozen=True, slots=True)
class FleetCommands:
    """Commands and conditions for pools, queues, GPU profiles and nodes.

    `bodies` are keyed by command name, `conditions` by resource uid. `pools` are valid Pools, oldest first.
    `cordoned_nodes` are the nodes of Pools that the cluster cordons. `estimated_gpus` are the profiles, as JSON text by
    name, that must be stored before the nodes of these GPU models are added.
    """

    bodies: Mapping[str, CommandBody] = field(default_factory=dict)
    conditions: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)
    pools: tuple[PoolResource, ...] = ()
    cordoned_nodes: frozenset[str] = frozenset()
    estimated_gpus: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ParsedPools:
    """Valid Pools, oldest first, and the names of `rejected` and `deleting` ones. Rejected Pools keep their nodes."""

    pools: tuple[PoolResource, ...]
    rejected: frozenset[str]
    deleting: frozenset[str]
    conditions: dict[str, tuple[Condition, ...]]


def compute_fleet_commands(
    pools: Iterable[Resource],
    queues: Iterable[Resource],
    nodes: Iterable[Resource],
    loaded: LoadedState,
    *,
    gpu_profiles: Iterable[Resource] = (),
) -> FleetCommands:
    """Return the required commands, except those already in the inbox."""
    snapshot = loaded.snapshot
    pools = tuple(pools)
    parsed, other_conditions = _parse_pools(pools, snapshot), dict[str, tuple[Condition, ...]]()
    machines = {host.name: host for host in map(parse_cluster_node, nodes)}
    membership = assign_nodes(parsed.pools, machines.values(), snapshot, rejected=parsed.rejected)
    managed = frozenset(pool.pool.name for pool in parsed.pools) | parsed.deleting
    memory = frozenset(name for resource in pools for name in _previously_cordoned(resource))
    changes = compute_node_commands(membership, machines, snapshot, managed=managed, previously_cordoned=memory)
    bodies: dict[str, CommandBody] = {}
    for profile in gpu_profiles:
        bodies |= _gpu_profile_commands(profile, snapshot, other_conditions)
    for pool in parsed.pools:
        bodies |= _pool_commands(pool, snapshot)
    bodies |= changes.bodies
    for name in sorted(parsed.deleting):
        if name in snapshot.pools and not any(node.pool == name for node in snapshot.nodes.values()):
            bodies[f"delete-pool-{name}"] = DeletePool(name)
    for queue in queues:
        bodies |= _queue_commands(queue, snapshot, other_conditions)
    waiting = [command.body for command in loaded.inbox]
    conditions = {**parsed.conditions, **_pool_conditions(parsed.pools, membership), **other_conditions}
    new = {name: body for name, body in bodies.items() if body not in waiting}
    return FleetCommands(new, conditions, parsed.pools, changes.cordoned_nodes, membership.estimates)


def _parse_pools(resources: Iterable[Resource], snapshot: Snapshot) -> _ParsedPools:
    pools, rejected, deleting, conditions = (
        list[PoolResource](),
        set[str](),
        set[str](),
        dict[str, tuple[Condition, ...]](),
    )
    for resource in sorted(resources, key=_age_key):
        meta = parse_metadata(resource)
        if meta.is_deleting:
            deleting.add(meta.name)
            conditions[meta.uid] = (_deletion_condition(meta.name, snapshot),)
            continue
        try:
            pool = parse_pool(resource)
            _check_kind(pool, snapshot)
        except InvalidDocumentError as refused:
            rejected.add(meta.name)
            conditions[meta.uid] = (Condition(ACCEPTED, False, "Refused", str(refused)),)
        except _KindChangedError as changed:
            rejected.add(meta.name)
            conditions[meta.uid] = (Condition(ACCEPTED, False, "KindChanged", str(changed)),)
        else:
            pools.append(pool)
    return _ParsedPools(tuple(pools), frozenset(rejected), frozenset(deleting), conditions)


class _KindChangedError(ValueError):
    """The Pool's kind differs from the kind of the existing pool."""


def _check_kind(pool: PoolResource, snapshot: Snapshot) -> None:
    existing = snapshot.pools.get(pool.pool.name)
    if existing is not None and existing.kind is not pool.pool.kind:
        raise _KindChangedError(f'kind: got "{pool.pool.kind}"; allowed: {existing.kind}, as it was created')


def _age_key(resource: Resource) -> tuple[str, str]:
    meta = parse_metadata(resource)
    return meta.created_at, meta.name


def _deletion_condition(name: str, snapshot: Snapshot) -> Condition:
    nodes = sorted(node.name for node in snapshot.nodes.values() if node.pool == name)
    if not nodes:
        return Condition(ACCEPTED, False, "Deleting", "all nodes are removed")
    return Condition(
        ACCEPTED, False, "Deleting", f"waiting for jobs to leave {len(nodes)} nodes: {format_names(nodes)}"
    )


def _previously_cordoned(resource: Resource) -> Iterable[str]:
    status = resource.get("status")
    names = status.get("cordonedNodes") if isinstance(status, Mapping) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else ()


def _pool_commands(pool: PoolResource, snapshot: Snapshot) -> dict[str, CommandBody]:
    pool_spec, name = pool.pool, pool.pool.name
    existing = snapshot.pools.get(name)
    if existing is None:
        return {f"create-pool-{name}": CreatePool(pool_spec)}
    if pool_spec.kind is PoolKind.INFERENCE and existing.lending != pool_spec.lending:
        return {f"set-lending-{name}": SetLendingPolicy(name, pool_spec.lending)}
    if existing.network != pool_spec.network:
        return {f"set-network-{name}": SetPoolNetwork(name, pool_spec.network)}
    if existing.serving != pool_spec.serving:
        return {f"set-serving-{name}": SetServedModels(name, pool_spec.serving)}
    return {}


def _pool_conditions(pools: Iterable[PoolResource], membership: PoolMembership) -> dict[str, tuple[Condition, ...]]:
    return {pool.uid: (build_accepted_condition(), *membership.build_conditions(pool)) for pool in pools}


def _queue_commands(
    resource: Resource, snapshot: Snapshot, conditions: dict[str, tuple[Condition, ...]]
) -> dict[str, CommandBody]:
    meta = parse_metadata(resource)
    existing = snapshot.queues.get(meta.name)
    if meta.is_deleting:
        return {f"delete-queue-{meta.name}": DeleteQueue(meta.name)} if existing is not None else {}
    try:
        queue = parse_queue(resource)
    except InvalidDocumentError as refused:
        conditions[meta.uid] = (Condition(ACCEPTED, False, "Refused", str(refused)),)
        return {}
    conditions[meta.uid] = (build_accepted_condition(),)
    if existing is None:
        return {f"create-queue-{meta.name}": CreateQueue(queue)}
    return {f"change-queue-{meta.name}": ChangeQueue(queue)} if existing != queue else {}


def _gpu_profile_commands(
    resource: Resource, snapshot: Snapshot, conditions: dict[str, tuple[Condition, ...]]
) -> dict[str, CommandBody]:
    """Return the commands of a GpuProfile. It replaces a profile that was set over HTTP, and is deleted like one."""
    meta = parse_metadata(resource)
    existing = snapshot.gpu_profiles.get(meta.name)
    if meta.is_deleting:
        has_other = find_gpu_source(meta.name, is_set_ignored=True) is not None
        users = "" if has_other else describe_gpu_users(meta.name, snapshot)
        message = f"there is no other profile, and {users} need this one; remove them first" if users else ""
        conditions[meta.uid] = (Condition(ACCEPTED, False, "Deleting", message),)
        is_deletable = existing is not None and not users
        return {f"delete-gpu-profile-{meta.name}": DeleteGpuProfile(meta.name)} if is_deletable else {}
    try:
        profile_json = parse_gpu_profile(resource)
    except (InvalidDocumentError, ProfileError) as refused:
        conditions[meta.uid] = (Condition(ACCEPTED, False, "Refused", str(refused)),)
        return {}
    conditions[meta.uid] = (build_accepted_condition(),)
    if is_equal_profile(profile_json, existing):
        return {}
    return {f"set-gpu-profile-{meta.name}": SetGpuProfile(meta.name, profile_json)}


def format_names(names: Collection[str]) -> str:
    """Return the first ten names and the number of others."""
    shown = sorted(names)[:10]
    return ", ".join(shown) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
