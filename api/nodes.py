"""Nodes: add, list, get, change, cordon, drain, remove."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Self

from fastapi import Response
from pydantic import Field, model_validator

from api.http.conditional_requests import IfMatchHeader, repeated_creation, require_match, set_etag
from api.http.dependencies import ContextDep, LimitParameter, NodeNamePath, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.http.paging import CursorParameter, PageOf, PoolParameter, page_by_name
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, VIEWER, requires
from api.plans import gpu_memory_bytes
from api.pool_views import NodeView, node_view
from api.state import RequestContext
from scheduler.documents import fleet
from scheduler.documents.document import Document, InvalidField, invalid_field
from scheduler.documents.fleet import LendableGpus, NodeDocument
from scheduler.domain.commands import AddNode, ChangeNode, CommandBody, CordonNode, RemoveNode, UncordonNode
from scheduler.domain.fleet import PROCESSOR_SLOTS, Node, PoolKind, find_lendable_gpus_problem
from scheduler.domain.machine import has_devices_for, host_declared_nodes
from scheduler.domain.suggestions import suggest
from scheduler.scheduling.preconditions import node_etag

router = create_router("fleet")

_SHAPE_FIELDS = ("pool", "gpu", "gpus", "gpu_memory_bytes")


class NodeChange(Document):
    """A change of a node."""

    lendable: Annotated[bool, Field(strict=True)] | None = Field(
        default=None,
        description="Whether the node can be lent. A lent node that no longer can is recalled. Null: as before.",
    )
    lendable_gpus: LendableGpus | None = Field(
        default=None,
        description="Indices of the GPUs that a loan takes while inference serves from the others, ascending. Empty: a "
        "loan takes the whole node. A loan of other GPUs is recalled. Null: as before.",
    )

    @model_validator(mode="after")
    def _check_change(self) -> Self:
        if self.lendable is None and self.lendable_gpus is None:
            raise invalid_field("lendable", None, "true or false if lendable_gpus is not given; set at least one")
        return self


@router.post("/nodes", status_code=201, responses=repeated_creation(NodeView) | problem_responses(409))
@requires(ADMIN)
def add_node(document: NodeDocument, context: ContextDep, response: Response) -> NodeView:
    """Add a node. Repeating the request returns 200 and changes nothing; another shape is a conflict."""
    node = fleet.to_node(document, gpu_memory_bytes=gpu_memory_bytes(document.gpu))
    if node.pool not in context.snapshot.pools:
        names = sorted(context.snapshot.pools)
        suggestion = suggest(node.pool, names)
        raise_invalid_field(
            "pool",
            node.pool,
            f"one of {', '.join(names)}{suggestion}" if names else "an existing pool. Create a pool first",
        )
    if not node.lendable and context.snapshot.pools[node.pool].kind is PoolKind.TRAINING:
        raise_invalid_field("lendable", False, f"true; pool {node.pool} is a training pool and lends nothing")
    if node.lendable_gpus and context.snapshot.pools[node.pool].kind is PoolKind.TRAINING:
        given, form = list(node.lendable_gpus), f"empty; pool {node.pool} is a training pool and lends nothing"
        raise_invalid_field("lendable_gpus", given, form)
    existing = context.snapshot.nodes.get(node.name)
    if existing is not None:
        refuse_other_shape(existing, node)
        _refuse_other_lendability(existing, document)
        declare_audited()
        response.status_code = 200
        return _node_response(context, existing, response)
    _check_devices(node, context)
    response.headers["Location"] = f"/v1/nodes/{node.name}"
    return _send_command(context, node.name, AddNode(node), response)


@router.get("/nodes", responses=problem_responses(404))
@requires(VIEWER)
def list_nodes(
    context: ContextDep, pool: PoolParameter = "", limit: LimitParameter = 100, cursor: CursorParameter = ""
) -> PageOf[NodeView]:
    """List all nodes, or those of one pool, by name."""
    if pool:
        context.pool(pool)
    nodes = {name: node for name, node in context.snapshot.nodes.items() if pool in ("", node.pool)}
    page = page_by_name("nodes", nodes, partial(_node_view, context=context), cursor=cursor, limit=limit)
    return {"items": context.redact(page["items"]), "next": page["next"]}


@router.get("/nodes/{name}")
@requires(VIEWER)
def get_node(name: NodeNamePath, context: ContextDep, response: Response) -> NodeView:
    """Return a node with its loan and its jobs."""
    return _node_response(context, context.node(name), response)


@router.delete("/nodes/{name}", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def remove_node(name: NodeNamePath, context: ContextDep, if_match: IfMatchHeader = "") -> NodeView:
    """Remove a node that no job holds and that is not lent."""
    node = context.node(name)
    basis = require_match(if_match, node_etag(node), f"node {name}")
    if context.snapshot.is_lent(node):
        raise_conflict(f"node {name} is lent to training. Drain it and wait until it is returned")
    holders = sorted(job.id for job in context.snapshot.jobs.values() if name in job.allocation.held)
    if holders:
        raise_conflict(f"node {name} is held by {', '.join(holders[:10])}. Drain it first")
    view = _node_view(node, context)
    context.send(RemoveNode(name), basis=basis)
    return view


@router.patch("/nodes/{name}", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def change_node(
    name: NodeNamePath, change: NodeChange, context: ContextDep, response: Response, if_match: IfMatchHeader = ""
) -> NodeView:
    """Set whether a node of an inference pool can be lent, and which GPUs a loan takes. Other loans are recalled."""
    node = context.node(name)
    basis = require_match(if_match, node_etag(node), f"node {name}")
    if context.snapshot.pools[node.pool].kind is PoolKind.TRAINING:
        raise_conflict(f"node {name} is in training pool {node.pool}. Only nodes of inference pools can be lent")
    indices = None if change.lendable_gpus is None else tuple(change.lendable_gpus)
    if indices is not None and (problem := find_lendable_gpus_problem(indices, node.gpus)):
        raise_invalid_field("lendable_gpus", list(indices), problem)
    return _send_command(context, name, ChangeNode(name, change.lendable, indices), response, basis=basis)


@router.post("/nodes/{name}:cordon", status_code=202)
@requires(ADMIN)
def cordon_node(name: NodeNamePath, context: ContextDep, response: Response, if_match: IfMatchHeader = "") -> NodeView:
    """Schedule nothing new on the node. Running jobs stay."""
    basis = require_match(if_match, node_etag(context.node(name)), f"node {name}")
    return _send_command(context, name, CordonNode(name), response, basis=basis)


@router.post("/nodes/{name}:drain", status_code=202)
@requires(ADMIN)
def drain_node(name: NodeNamePath, context: ContextDep, response: Response, if_match: IfMatchHeader = "") -> NodeView:
    """Cordon the node and move its jobs away."""
    basis = require_match(if_match, node_etag(context.node(name)), f"node {name}")
    return _send_command(context, name, CordonNode(name, drain=True), response, basis=basis)


@router.post("/nodes/{name}:uncordon", status_code=202)
@requires(ADMIN)
def uncordon_node(
    name: NodeNamePath, context: ContextDep, response: Response, if_match: IfMatchHeader = ""
) -> NodeView:
    """Allow scheduling on the node again. A quarantined node is released, and its incidents are forgotten."""
    basis = require_match(if_match, node_etag(context.node(name)), f"node {name}")
    return _send_command(context, name, UncordonNode(name), response, basis=basis)


def _check_devices(node: Node, context: RequestContext) -> None:
    """Refuse a declared node whose GPUs the service's own machine does not have, or has given to another node."""
    machines, nodes = context.store.machines.list_machines(), context.snapshot.nodes
    own = next((each for each in host_declared_nodes(machines, nodes) if each.is_service), None)
    if own is None or node.gpu == PROCESSOR_SLOTS:
        return
    if not own.inventory.gpus:
        raise_invalid_field(
            "gpu",
            node.gpu,
            f"{PROCESSOR_SLOTS}: declared nodes are on machine {own.name} of the service, and no driver reports a GPU. "
            "Machines with GPUs join with `ebbtide agent`, and state what no driver reports with its --gpus and --gpu",
        )
    others = [name for name in own.nodes if nodes[name].gpu != PROCESSOR_SLOTS and has_devices_for(own, nodes[name])]
    if others:
        raise_conflict(
            f"node {node.name}: the GPUs of machine {own.name} belong to node {others[0]}. Other machines join with "
            "`ebbtide agent`"
        )
    if not has_devices_for(own, node):
        raise_invalid_field("gpus", node.gpus, f"at most {len(own.inventory.gpus)}, the GPUs of machine {own.name}")


def _send_command(
    context: RequestContext, name: str, body: CommandBody, response: Response, *, basis: str = ""
) -> NodeView:
    after = context.send(body, basis=basis)
    return _node_response(after, after.snapshot.nodes[name], response)


def _node_response(context: RequestContext, node: Node, response: Response) -> NodeView:
    set_etag(response, node_etag(node))
    return context.redact(_node_view(node, context))


def _node_view(node: Node, context: RequestContext) -> NodeView:
    return node_view(node, context.snapshot, context.principal)


def refuse_other_shape(existing: Node, requested: Node) -> None:
    """Raise a 409 if the shape differs. The shape of a registered node is fixed."""
    differing = [field for field in _SHAPE_FIELDS if getattr(existing, field) != getattr(requested, field)]
    if differing:
        refusals = [
            InvalidField(field, getattr(requested, field), f"{getattr(existing, field)}, as it was registered")
            for field in differing
        ]
        raise_conflict(f"node {existing.name} is registered with another {', '.join(differing)}", *refusals)


def _refuse_other_lendability(existing: Node, requested: NodeDocument) -> None:
    if "lendable" in requested.model_fields_set and requested.lendable is not existing.lendable:
        field = InvalidField("lendable", requested.lendable, f"{str(existing.lendable).lower()}, as it is now")
        raise_conflict(f"node {existing.name} is registered with another lendable. Change it with PATCH", field)
    given, known = requested.lendable_gpus, list(existing.lendable_gpus)
    if "lendable_gpus" in requested.model_fields_set and given != known:
        field = InvalidField("lendable_gpus", str(given), f"{known}, as it is now")
        raise_conflict(f"node {existing.name} is registered with other lendable_gpus. Change them with PATCH", field)
