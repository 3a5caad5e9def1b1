"""Pools, Queues and Loans as the snapshot has them, as steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.intake import Resources
from scheduler.k8s.kinds import LOAN, POOL, POOL_FINALIZER, QUEUE, QUEUE_FINALIZER, Kind
from scheduler.k8s.resources.elastic_job_status import stamped
from scheduler.k8s.resources.job_queue import queue_status
from scheduler.k8s.resources.loan import loan_resource, loan_status
from scheduler.k8s.resources.metadata import Resource, metadata, part
from scheduler.k8s.resources.pool import pool_status
from scheduler.k8s.steps import Create, Delete, Steps, status_patched
from scheduler.k8s.writing import World, keep, let_go, status_steps
from scheduler.policies.quota import queue_uses

_ENDED = (LoanState.RETURNED.value, LoanState.LOST.value)


def publish_pools(world: World) -> Iterator[Steps]:
    for resource in world.resources.pools:
        claims = world.taken.claims[metadata(resource).uid]
        before = part(resource, "status").get("cordonedNodes")
        names = frozenset(name for name in before if isinstance(name, str)) if isinstance(before, list) else frozenset()
        cordoned = world.taken.fleet.cordoned | names
        status = pool_status(metadata(resource).name, world.snapshot, claims=claims, cordoned=cordoned)
        yield _owned(POOL, resource, status, world, known=world.snapshot.pools, finalizer=POOL_FINALIZER)


def publish_queues(world: World) -> Iterator[Steps]:
    uses = queue_uses(world.snapshot) if world.resources.queues else {}
    for resource in world.resources.queues:
        meta = metadata(resource)
        status = queue_status(uses.get(meta.name), world.taken.claims.get(meta.uid, ()))
        yield _owned(QUEUE, resource, status, world, known=world.snapshot.queues, finalizer=QUEUE_FINALIZER)


def publish_loans(world: World) -> Iterator[Steps]:
    """Each live loan has a Loan; one that has ended stays for a while, so that the story can be read."""
    loans = {loan.id: loan for loan in world.snapshot.loans.values()}
    present = {metadata(resource).name: resource for resource in world.resources.loans}
    for name, loan in loans.items():
        if name not in present:
            made = loan_resource(loan, world.stamp)
            yield Create(LOAN, made), status_patched(LOAN, metadata(made), loan_status(loan, world.snapshot))
    for name, resource in present.items():
        known = loans.get(name) or world.ended_loans.get(name)
        yield _loan(resource, known, world)


def unknown_loans(resources: Resources, snapshot: Snapshot) -> tuple[str, ...]:
    """Ids of loans that are not in the snapshot and whose resources do not say yet how they ended."""
    live = {loan.id for loan in snapshot.loans.values()}
    told = {metadata(each).name for each in resources.loans if part(each, "status").get("state") in _ENDED}
    return tuple(name for each in resources.loans if (name := metadata(each).name) not in live | told)


def _loan(resource: Resource, loan: Loan | None, world: World) -> Steps:
    meta, status = world.meta(resource), part(resource, "status")
    has_ended = status.get("state") in _ENDED
    if has_ended and not world.is_older(status.get("stateSince"), world.retention.loans_s):
        return ()
    if meta.is_deleting:
        return ()
    if has_ended or loan is None:
        return (Delete(LOAN, "", meta.name, meta.uid),)
    return status_steps(LOAN, resource, loan_status(loan, world.snapshot), world)


def _owned(
    kind: Kind,
    resource: Resource,
    status: dict[str, Any],
    world: World,
    *,
    known: Mapping[str, object],
    finalizer: str,
) -> Steps:
    """Keep it until the fleet knows it no more, and say where it stands."""
    meta = world.meta(resource)
    if meta.is_deleting and meta.name not in known:
        return let_go(kind, meta, finalizer)
    before = part(resource, "status")
    written = stamped(status, meta, before=before, observed=meta.generation, now_s=world.now_s)
    return (*keep(kind, meta, finalizer, world.stamp), *status_steps(kind, resource, written, world))
