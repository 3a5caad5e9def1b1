"""Pools: create, list, look at, change what may be lent, delete."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Response

from api.answers.fleet import PoolView, pool_view
from api.answers.page import PageOf
from api.dependencies import Limit, WorldDep
from api.errors import conflict
from api.paging import Cursor, page_by_name
from api.preconditions import IfMatch, put_tag, require_match
from api.problems import problems
from api.routing import noun_router
from api.world import World
from scheduler.core.preconditions import pool_tag
from scheduler.documents import fleet
from scheduler.documents.document import Document
from scheduler.documents.fleet import LendingDocument, PoolDocument
from scheduler.documents.refusal import Refusal
from scheduler.domain.codec import encode
from scheduler.domain.command import CreatePool, DeletePool, SetLendingPolicy
from scheduler.domain.fleet import Pool, PoolKind

router = noun_router("fleet")


class PoolChange(Document):
    """Fields of `lending` that are left out stay as they are."""

    lending: LendingDocument


@router.post("/pools", status_code=201, responses=problems(409))
def create_pool(document: PoolDocument, world: WorldDep, response: Response) -> PoolView:
    """Create a pool. The same pool again answers 200 and changes nothing; another of its name is refused."""
    pool = fleet.pool(document)
    present = world.snapshot.pools.get(pool.name)
    if present is not None:
        _refuse_difference(present, pool)
        response.status_code = 200
        return _told(world, present, response)
    after = world.send(CreatePool(pool))
    response.headers["Location"] = f"/v1/pools/{pool.name}"
    return _told(after, pool, response)


@router.get("/pools")
def list_pools(world: WorldDep, limit: Limit = 100, cursor: Cursor = "") -> PageOf[PoolView]:
    """All pools, by name."""
    pools = world.snapshot.pools
    return page_by_name("pools", pools, lambda pool: pool_view(pool, world.snapshot), cursor=cursor, limit=limit)


@router.get("/pools/{name}")
def get_pool(name: str, world: WorldDep, response: Response) -> PoolView:
    """A pool with its capacity and, for inference, its lending policy and demand."""
    return _told(world, world.pool(name), response)


@router.patch("/pools/{name}", status_code=202, responses=problems(409))
def change_pool(name: str, change: PoolChange, world: WorldDep, response: Response, if_match: IfMatch = "") -> PoolView:
    """Change what the pool's owner allows. Loans that are no longer allowed are recalled."""
    pool = world.pool(name)
    basis = require_match(if_match, pool_tag(pool), f"pool {name}")
    if pool.kind is PoolKind.TRAINING:
        conflict(f"pool {name} is of kind training: it lends nothing")
    wanted = fleet.lending_policy(change.lending)
    given = {field: getattr(wanted, field) for field in change.lending.model_fields_set}
    after = world.send(SetLendingPolicy(name, replace(pool.lending, **given)), basis=basis)
    return _told(after, after.snapshot.pools[name], response)


@router.delete("/pools/{name}", status_code=202, responses=problems(409))
def delete_pool(name: str, world: WorldDep, if_match: IfMatch = "") -> PoolView:
    """Delete an empty pool."""
    pool = world.pool(name)
    basis = require_match(if_match, pool_tag(pool), f"pool {name}")
    nodes = [node for node in world.snapshot.nodes.values() if node.pool == name]
    lent = sorted(node.name for node in nodes if world.snapshot.is_lent(node))
    if lent:
        conflict(f"pool {name} has nodes lent: {', '.join(lent[:10])}; recall them, then remove its nodes first")
    if nodes:
        names = ", ".join(sorted(node.name for node in nodes)[:10])
        conflict(f"pool {name} still has {len(nodes)} node{'s' * (len(nodes) > 1)}: {names}; remove them first")
    world.send(DeletePool(name), basis=basis)
    return pool_view(pool, world.snapshot)


def _told(world: World, pool: Pool, response: Response) -> PoolView:
    put_tag(response, pool_tag(pool))
    return pool_view(pool, world.snapshot)


def _refuse_difference(present: Pool, wanted: Pool) -> None:
    if present == wanted:
        return
    field = "kind" if present.kind is not wanted.kind else "lending"
    value, allowed = encode(getattr(wanted, field)), encode(getattr(present, field))
    detail = f"pool {present.name} exists with another {field}"
    conflict(detail, Refusal(field, str(value), f"{allowed}, as it was created"))
