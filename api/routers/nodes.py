"""Nodes: register, list, look at, cordon, drain, remove."""

from __future__ import annotations

from fastapi import Response

from api.answers.fleet import NodeView, node_view
from api.answers.page import PageOf
from api.checks import gpu_memory_bytes
from api.dependencies import Limit, WorldDep
from api.errors import conflict, refuse
from api.filters import Text
from api.paging import Cursor, page_by_name
from api.preconditions import IfMatch, put_tag, require_match
from api.problems import problems
from api.routing import noun_router
from api.world import World
from scheduler.core.preconditions import node_tag
from scheduler.documents import fleet
from scheduler.documents.fleet import NodeDocument
from scheduler.documents.refusal import Refusal
from scheduler.domain.command import AddNode, CommandBody, CordonNode, RemoveNode, UncordonNode
from scheduler.domain.fleet import Node
from scheduler.domain.spelling import meant

router = noun_router("fleet")

_SHAPE = ("pool", "gpu", "gpus", "gpu_memory_bytes")


@router.post("/nodes", status_code=201, responses=problems(409))
def add_node(document: NodeDocument, world: WorldDep, response: Response) -> NodeView:
    """Register a node. The same shape again answers 200 and changes nothing; another shape is refused."""
    node = fleet.node(document, gpu_memory_bytes=gpu_memory_bytes(document.gpu))
    if node.pool not in world.snapshot.pools:
        names = sorted(world.snapshot.pools)
        near = meant(node.pool, names)
        refuse("pool", node.pool, f"one of {', '.join(names)}{near}" if names else "an existing pool; make one first")
    present = world.snapshot.nodes.get(node.name)
    if present is not None:
        _refuse_other_shape(present, node)
        response.status_code = 200
        return _told(world, present, response)
    response.headers["Location"] = f"/v1/nodes/{node.name}"
    return _asked(world, node.name, AddNode(node), response)


@router.get("/nodes", responses=problems(404))
def list_nodes(world: WorldDep, pool: Text = "", limit: Limit = 100, cursor: Cursor = "") -> PageOf[NodeView]:
    """All nodes, or those of one pool, by name."""
    if pool:
        world.pool(pool)
    nodes = {name: node for name, node in world.snapshot.nodes.items() if pool in ("", node.pool)}
    page = page_by_name("nodes", nodes, lambda node: node_view(node, world.snapshot), cursor=cursor, limit=limit)
    return {"items": world.redacted(page["items"]), "next": page["next"]}


@router.get("/nodes/{name}")
def get_node(name: str, world: WorldDep, response: Response) -> NodeView:
    """A node with its loan and the jobs on it."""
    return _told(world, world.node(name), response)


@router.delete("/nodes/{name}", status_code=202, responses=problems(409))
def remove_node(name: str, world: WorldDep, if_match: IfMatch = "") -> NodeView:
    """Remove a node that nobody holds and that is not lent."""
    node = world.node(name)
    basis = require_match(if_match, node_tag(node), f"node {name}")
    if world.snapshot.is_lent(node):
        conflict(f"node {name} is lent to training; drain it, and it goes home first")
    holders = sorted(job.id for job in world.snapshot.jobs.values() if name in job.allocation.held)
    if holders:
        conflict(f"node {name} is held by {', '.join(holders[:10])}; drain it first")
    view = node_view(node, world.snapshot)
    world.send(RemoveNode(name), basis=basis)
    return view


@router.post("/nodes/{name}:cordon", status_code=202)
def cordon_node(name: str, world: WorldDep, response: Response, if_match: IfMatch = "") -> NodeView:
    """Nothing new is put on the node; what runs there stays."""
    basis = require_match(if_match, node_tag(world.node(name)), f"node {name}")
    return _asked(world, name, CordonNode(name), response, basis=basis)


@router.post("/nodes/{name}:drain", status_code=202)
def drain_node(name: str, world: WorldDep, response: Response, if_match: IfMatch = "") -> NodeView:
    """Cordon the node and move its jobs away."""
    basis = require_match(if_match, node_tag(world.node(name)), f"node {name}")
    return _asked(world, name, CordonNode(name, drain=True), response, basis=basis)


@router.post("/nodes/{name}:uncordon", status_code=202)
def uncordon_node(name: str, world: WorldDep, response: Response, if_match: IfMatch = "") -> NodeView:
    """Let the node take jobs again."""
    basis = require_match(if_match, node_tag(world.node(name)), f"node {name}")
    return _asked(world, name, UncordonNode(name), response, basis=basis)


def _asked(world: World, name: str, body: CommandBody, response: Response, *, basis: str = "") -> NodeView:
    after = world.send(body, basis=basis)
    return _told(after, after.snapshot.nodes[name], response)


def _told(world: World, node: Node, response: Response) -> NodeView:
    put_tag(response, node_tag(node))
    return world.redacted(node_view(node, world.snapshot))


def _refuse_other_shape(present: Node, wanted: Node) -> None:
    """What a node is made of is fixed for as long as it is registered."""
    differing = [field for field in _SHAPE if getattr(present, field) != getattr(wanted, field)]
    if differing:
        refusals = [
            Refusal(field, getattr(wanted, field), f"{getattr(present, field)}, as it was registered")
            for field in differing
        ]
        conflict(f"node {present.name} is registered with another {', '.join(differing)}", *refusals)
