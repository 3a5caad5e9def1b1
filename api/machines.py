"""Machines: join tokens, joining, list, get, revoke."""

from __future__ import annotations

import re
from typing import Annotated, Any, NoReturn, NotRequired, cast

from fastapi import Path, Query, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import (
    ContextDep,
    LimitParameter,
    MachineNamePath,
    PrincipalDep,
    Service,
    ServiceDep,
    create_router,
    with_hosted_nodes,
)
from api.http.errors import ProblemError, problem_responses, raise_invalid_field, raise_not_found
from api.http.paging import TEXT_PATTERN, CursorParameter, PageOf, decode_cursor, encode_cursor, page_by_name
from api.identity.audit import new_audit_entry
from api.identity.authentication import parse_bearer_token
from api.identity.authorization import ADMIN, VIEWER, Caller, RouteRule, requires
from api.identity.machine_credentials import generate_credential, generate_join_token
from api.identity.principals import Grant, Principal, Role, token_digest
from api.nodes import refuse_other_shape
from api.state import RequestContext, load_request_context
from scheduler.documents.document import InvalidField
from scheduler.documents.machine import (
    RESERVED_NAMES,
    InventoryDocument,
    JoinDocument,
    JoinTokenDocument,
    MachineFactsDocument,
    to_inventory,
)
from scheduler.domain.codec import encode
from scheduler.domain.commands import AddNode, RemoveNode
from scheduler.domain.fleet import Node
from scheduler.domain.gpu_sets import format_gpu_count
from scheduler.domain.machine import CLOCK_SKEW_S_MAX, JoinToken, Machine, MachineInventory, host_declared_nodes
from scheduler.domain.suggestions import suggest
from scheduler.executors.agent_executor import CONTACT_MARGIN_S
from scheduler.package_version import get_package_version
from scheduler.runtime.estimated_gpus import load_estimated_gpus, save_estimated_gpus
from scheduler.solver.profiles.catalog import is_estimated_gpu, load_gpu
from scheduler.solver.profiles.estimated_gpu import estimate_profile, find_profile, name_estimate
from scheduler.store.api_protocol import AuditEntry, JoinTokenSpentError, MachineNameTakenError


class JoinTokenView(TypedDict):
    """A join token without its secret."""

    id: Annotated[str, Field(description="Public id, with which to revoke the token.")]
    pool: Annotated[str, Field(description="Pool that will own the nodes of machines that join with it.")]
    uses_left: Annotated[int, Field(description="How many more machines may join with it.")]
    created_at_s: Annotated[float, Field(description="Time of creation, in seconds since 1970 (UTC).")]
    created_by: Annotated[str, Field(description="Principal that requested the token.")]
    expires_at_s: Annotated[float, Field(description="End of validity, in seconds since 1970 (UTC).")]
    secret: NotRequired[
        Annotated[str, Field(description="Text that a joining agent sends. Only in the response to its creation.")]
    ]


class MachineView(TypedDict):
    """A machine that joined a pool."""

    name: Annotated[str, Field(description="Unique name, which the node that it hosts has as well.")]
    nodes: Annotated[list[str], Field(description="Names of the nodes that it hosts.")]
    pool: Annotated[
        str,
        Field(description="Pool that owns its nodes, as the join token named it. Empty: the service's own machine."),
    ]
    gpu: Annotated[str, Field(description="Profile name of the GPU model, such as `h100-80g`.")]
    gpus: Annotated[int, Field(description="Number of GPUs that it reported.")]
    estimated: Annotated[
        bool, Field(description="Whether the GPU profile was estimated from what the machine reported.")
    ]
    address: Annotated[str, Field(description="Host name or IP address at which ranks elsewhere reach it.")]
    agent_version: Annotated[str, Field(description="Release that the agent runs.")]
    containment: Annotated[str, Field(description="Level of isolation of ranks that the agent states. Empty: unknown.")]
    joined_at_s: Annotated[float, Field(description="Time at which it joined, in seconds since 1970 (UTC).")]
    temporary: Annotated[
        bool, Field(description="Whether it is removed with its node once it has left or is silent for long.")
    ]
    problem: Annotated[
        str, Field(description="How its GPUs differ from those of its node, and what to do. Empty: they do not.")
    ]
    seen_at_s: Annotated[
        float | None, Field(description="Time of the latest report, in seconds since 1970 (UTC). Null: none yet.")
    ]
    revoked_at_s: Annotated[
        float | None, Field(description="Time of revocation, in seconds since 1970 (UTC). Null: not revoked.")
    ]


class MachineDetailsView(MachineView):
    """A machine with its hardware."""

    inventory: Annotated[InventoryDocument, Field(description="Hardware as the agent last detected it.")]


class JoinedMachineView(TypedDict):
    """A machine that has just joined."""

    machine: Annotated[MachineView, Field(description="As the service registered it.")]
    credential: Annotated[
        str, Field(description="Text with which its agent reports. No other response contains it again.")
    ]


def join_token_view(token: JoinToken) -> JoinTokenView:
    view = encode(token)
    del view["digest"]
    return cast("JoinTokenView", view)


def machine_view(machine: Machine, node: Node | None) -> MachineView:
    """Return the view of a machine. `node` is its node as it was registered, None if it was deleted."""
    return {
        "name": machine.name,
        "nodes": list(machine.nodes),
        "pool": machine.pool,
        "gpu": machine.gpu,
        "gpus": len(machine.inventory.gpus),
        "estimated": is_estimated_gpu(machine.gpu),
        "address": machine.address,
        "agent_version": machine.agent_version,
        "containment": machine.containment,
        "joined_at_s": machine.joined_at_s,
        "temporary": machine.is_temporary,
        "problem": ""
        if node is None or machine.is_service or not machine.is_live
        else describe_difference(machine, node),
        "seen_at_s": machine.seen_at_s,
        "revoked_at_s": machine.revoked_at_s,
    }


router = create_router("machines")

_MEMORY_TOLERANCE = 0.02
"""Drivers of different versions reserve different parts of a GPU's memory."""

JoinTokenIdPath = Annotated[str, Path(description="Public id from the response to its creation, not the secret.")]
_TOKEN_HINT = "a machine joins with a token of `ebbtide machines token`: Authorization: Bearer ebj_..."


@router.post("/machines/tokens", status_code=201)
@requires(ADMIN)
def create_join_token(
    document: JoinTokenDocument, service: ServiceDep, principal: PrincipalDep, response: Response
) -> JoinTokenView:
    """Create a join token. Only this response contains its secret; the service stores a digest."""
    now_s = service.clock.now_s()
    pools = load_request_context(service.state_reader, service.store, now_s, principal).snapshot.pools
    if document.pool not in pools:
        names = sorted(pools)
        allowed = f"one of {', '.join(names)}{suggest(document.pool, names)}" if names else "an existing pool"
        raise_invalid_field("pool", document.pool, allowed)
    token, secret = generate_join_token(
        document.pool,
        uses=document.uses,
        created_by=principal.name,
        now_s=now_s,
        expires_at_s=now_s + document.expires_in_s,
    )
    service.store.machines.add_token(token, _token_audit_entry("CreateJoinToken", token, principal, now_s))
    response.headers["Location"] = f"/v1/machines/tokens/{token.id}"
    response.headers["Cache-Control"] = "no-store"
    return {**join_token_view(token), "secret": secret}


@router.get("/machines/tokens")
@requires(ADMIN)
def list_join_tokens(
    service: ServiceDep, limit: LimitParameter = 100, cursor: CursorParameter = ""
) -> PageOf[JoinTokenView]:
    """List all join tokens by id, including used and expired ones, without their secrets."""
    place = decode_cursor(cursor, "join tokens", str)
    found = service.store.machines.list_tokens(after=place[0] if place else "", limit=limit + 1)
    next_cursor = encode_cursor("join tokens", found[limit - 1].id) if len(found) > limit else None
    return {"items": [join_token_view(token) for token in found[:limit]], "next": next_cursor}


@router.delete("/machines/tokens/{join_token_id}")
@requires(ADMIN)
def delete_join_token(join_token_id: JoinTokenIdPath, service: ServiceDep, principal: PrincipalDep) -> JoinTokenView:
    """Delete a join token. Machines that joined with it stay."""
    token = service.store.machines.get_token(join_token_id) or raise_not_found("join token", join_token_id)
    entry = _token_audit_entry("DeleteJoinToken", token, principal, service.clock.now_s())
    service.store.machines.delete_token(token.id, entry)
    return join_token_view(token)


@router.post("/machines:join", status_code=201, responses=problem_responses(409))
@requires(RouteRule(Caller.JOINING_MACHINES))
def join_machine(
    document: JoinDocument, request: Request, service: ServiceDep, response: Response
) -> JoinedMachineView:
    """Join the pool of the token and register the machine's node. Only this response contains the credential.

    An existing node of the same name and shape is used. A GPU model without a profile gets an estimated one.
    """
    now_s = service.clock.now_s()
    token = _require_join_token(service, request, now_s)
    check_agent(document, now_s)
    principal = Principal(f"join token {token.id}", (Grant(Role.ADMIN),), subject=f"join-token:{token.id}")
    context = load_request_context(service.state_reader, service.store, now_s, principal)
    _check_name(document, token, context)
    _check_lease(document.name, service, now_s)
    inventory = read_inventory(document)
    gpu = choose_profile(document.name, inventory, service, now_s)
    digest, credential = generate_credential()
    machine = Machine(
        document.name,
        (document.name,),
        token.pool,
        gpu,
        document.address,
        document.version,
        now_s,
        containment=document.containment,
        inventory=inventory,
        digest=digest,
        is_temporary=document.temporary,
    )
    _register(machine, token, context)
    response.headers["Location"] = f"/v1/machines/{machine.name}"
    response.headers["Cache-Control"] = "no-store"
    return {"machine": machine_view(machine, None), "credential": credential}


@router.get("/machines")
@requires(VIEWER)
def list_machines(
    service: ServiceDep,
    context: ContextDep,
    node: Annotated[
        str,
        Query(max_length=300, pattern=TEXT_PATTERN, description="Only the machine that hosts this node. Empty: all."),
    ] = "",
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[MachineView]:
    """List all machines by name, including revoked ones, without their inventories."""
    nodes = context.snapshot.nodes
    hosts = host_declared_nodes(service.store.machines.list_machines(), nodes)
    machines = {each.name: each for each in hosts if not node or node in each.nodes}
    return page_by_name(
        "machines", machines, lambda each: machine_view(each, nodes.get(each.name)), cursor=cursor, limit=limit
    )


@router.get("/machines/{name}")
@requires(VIEWER)
def get_machine(name: MachineNamePath, service: ServiceDep, context: ContextDep) -> MachineDetailsView:
    """Return a machine with its inventory."""
    found = service.store.machines.get_machine(name) or raise_not_found("machine", name)
    found = with_hosted_nodes(service, found, context.snapshot)
    return {**machine_view(found, context.snapshot.nodes.get(name)), "inventory": encode(found.inventory)}


@router.delete("/machines/{name}")
@requires(ADMIN)
def revoke_machine(name: MachineNamePath, service: ServiceDep, principal: PrincipalDep) -> MachineView:
    """Revoke a machine's credential. Every process rejects it within 5 s. Its node stays: drain it before.

    Revoking again changes nothing.
    """
    now_s, found = service.clock.now_s(), service.store.machines.get_machine(name)
    if found is None:
        raise_not_found("machine", name)
    entry = machine_audit_entry("RevokeMachine", found, principal, now_s)
    revoked = service.store.machines.revoke_machine(name, now_s, entry)
    service.machine_credentials.forget()
    return machine_view(revoked or raise_not_found("machine", name), None)


def _require_join_token(service: Service, request: Request, now_s: float) -> JoinToken:
    secret = parse_bearer_token(request.headers.get("Authorization", ""), hint=_TOKEN_HINT)
    token = service.store.machines.find_token(token_digest(secret))
    if token is None:
        _refuse_token("join-token-unknown", "the join token does not exist. Check that it belongs to this service")
    _check_token(token, now_s)
    return token


def _check_token(token: JoinToken, now_s: float) -> None:
    if token.uses_left < 1:
        _refuse_token("join-token-used", f"the join token {token.id} has no uses left. Create another one")
    if now_s >= token.expires_at_s:
        _refuse_token("join-token-expired", f"the join token {token.id} has expired. Create another one")


def _refuse_token(slug: str, detail: str) -> NoReturn:
    raise ProblemError(401, slug, detail, headers={"WWW-Authenticate": "Bearer"})


def check_agent(document: MachineFactsDocument, now_s: float) -> None:
    """Check the agent's version and clock.

    Raises:
        ProblemError: 409 if one differs too much from the service's.
    """
    version = get_package_version()
    if _minor_version(document.version) != _minor_version(version):
        allowed = f"{_minor_version(version)}.x, as the service"
        field = InvalidField("version", document.version, allowed)
        raise ProblemError(
            409, "agent-incompatible", f"the agent has version {document.version}; install {version}", (field,)
        )
    skew_s = document.clock_s - now_s
    if abs(skew_s) > CLOCK_SKEW_S_MAX:
        allowed = f"at most {CLOCK_SKEW_S_MAX:.0f} s from {now_s:.0f}, the time of the service"
        direction = "ahead of" if skew_s > 0 else "behind"
        detail = f"the machine's clock is {abs(skew_s):.0f} s {direction} the service's. Synchronize it with NTP"
        raise ProblemError(409, "clock-skew", detail, (InvalidField("clock_s", document.clock_s, allowed),))


def _minor_version(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def _check_name(document: JoinDocument, token: JoinToken, context: RequestContext) -> None:
    if document.name in RESERVED_NAMES:
        raise_invalid_field("name", document.name, f"a name other than {', '.join(sorted(RESERVED_NAMES))}")
    if token.pool not in context.snapshot.pools:
        field = InvalidField("pool", token.pool, "an existing pool. Create the pool or another token")
        raise ProblemError(409, "pool-missing", f"pool {token.pool} of the join token does not exist", (field,))
    existing = context.store.machines.get_machine(document.name)
    if existing is not None and existing.is_live:
        _refuse_name(document.name)


def _check_lease(name: str, service: Service, now_s: float) -> None:
    """Refuse the name of a removed machine while ranks may still run on it: they end with the lease."""
    removed = service.store.machines.get_machine(name)
    if removed is None or removed.seen_at_s is None:
        return
    left_s = removed.seen_at_s + service.settings.disconnect_s + CONTACT_MARGIN_S - now_s
    if left_s > 0:
        field = InvalidField("name", name, "a name that no machine has")
        detail = (
            f"ranks may still run on the removed machine {name}. Join again in {left_s:.0f} s, or choose another name"
        )
        raise ProblemError(409, "machine-name-taken", detail, (field,))


def _refuse_name(name: str) -> NoReturn:
    field = InvalidField("name", name, "a name that no machine has")
    detail = f"machine {name} has joined already. Choose another name, or run `ebbtide machines remove {name}` first"
    raise ProblemError(409, "machine-name-taken", detail, (field,))


def read_inventory(document: MachineFactsDocument, *, may_lack_gpus: bool = False) -> MachineInventory:
    """Return the reported inventory, with the GPU model that the document names instead, if any."""
    if not document.gpu:
        return to_inventory(document.inventory, may_lack_gpus=may_lack_gpus)
    renamed = [gpu.model_copy(update={"name": document.gpu}) for gpu in document.inventory.gpus]
    return to_inventory(document.inventory.model_copy(update={"gpus": renamed}))


def choose_profile(machine: str, inventory: MachineInventory, service: Service, now_s: float) -> str:
    """Return the name of the GPUs' profile, after storing a new estimate if there is none.

    It is stored before the node is added: a plan that is requested without it would count as infeasible for good.
    """
    load_estimated_gpus(service.store.machines)
    device = inventory.gpus[0]
    if (known := find_profile(device)) is not None:
        return known
    if not device.memory_bytes:
        allowed = "the memory of a GPU model without a profile. State it with --gpu-memory"
        raise_invalid_field("inventory.gpus.0.memory_bytes", 0, allowed)
    name = name_estimate(device)
    estimate = {name: estimate_profile(inventory)}
    save_estimated_gpus(service.store.machines, estimate, origin=machine, now_s=now_s)
    return name


def _register(machine: Machine, token: JoinToken, context: RequestContext) -> None:
    """Add the node unless it exists, then use the token and store the machine.

    In this order a request that failed halfway can be repeated: the node is found, and the token still has its use.
    """
    node, existing = build_node(machine), context.snapshot.nodes.get(machine.name)
    if existing is not None:
        refuse_other_shape(existing, node)
    # The entry of the machine is the entry of its node too: one request is one change.
    with_node = context if existing is not None else context.send(AddNode(node), is_audited=False)
    entry = machine_audit_entry("JoinMachine", machine, context.principal, machine.joined_at_s)
    try:
        context.store.machines.join(machine, token.id, entry, now_s=machine.joined_at_s)
    except (JoinTokenSpentError, MachineNameTakenError) as error:
        # A concurrent join came first, of the same name or with the last use of the token.
        if isinstance(error, MachineNameTakenError):
            _refuse_name(machine.name)
        if existing is None:
            with_node.send(RemoveNode(node.name), is_audited=False)
        _refuse_token("join-token-used", f"the join token {token.id} has no uses left. Create another one")


def machine_principal(name: str) -> Principal:
    """Return the principal of what a machine's agent requests for its own machine."""
    return Principal(f"machine {name}", (Grant(Role.ADMIN),), subject=f"machine:{name}")


def describe_difference(machine: Machine, node: Node) -> str:
    """Return how the GPUs of a machine differ from those of its node, and what to do; empty if they do not."""
    found, advice = build_node(machine), f"To use its GPUs, run `ebbtide machines remove {machine.name}`"
    advice += f" and `ebbtide nodes delete {node.name}`, and join it with a new state folder"
    has = f"{format_gpu_count(found.gpus)} {found.gpu}"
    if lacks_gpus(found, node):
        registered = f"{format_gpu_count(node.gpus)} {node.gpu}"
        return f"the machine has {has}, but its node {registered}; the node is drained. {advice}"
    if found.gpus > node.gpus:
        return f"the machine has {has}, of which its node uses {node.gpus}. {advice}"
    return ""


def lacks_gpus(found: Node, registered: Node) -> bool:
    """Return whether GPUs of the registered node are gone, are of another model or have less memory."""
    least_bytes = (1.0 - _MEMORY_TOLERANCE) * registered.gpu_memory_bytes
    return found.gpu != registered.gpu or found.gpus < registered.gpus or found.gpu_memory_bytes < least_bytes


def build_node(machine: Machine) -> Node:
    """Return the node of the machine. Plans use no more memory than the profile has, and no more than is there."""
    gpus = machine.inventory.gpus
    sizes = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes]
    memory_bytes = min([load_gpu(machine.gpu).memory_bytes, *sizes])
    return Node(machine.name, machine.pool, machine.gpu, len(gpus), memory_bytes)


def _token_audit_entry(action: str, token: JoinToken, principal: Principal, now_s: float) -> AuditEntry:
    fields = {"pool": token.pool, "uses_left": token.uses_left, "expires_at_s": token.expires_at_s}
    return _audit_entry(action, token.id, fields, principal, now_s)


def machine_audit_entry(action: str, machine: Machine, principal: Principal, now_s: float) -> AuditEntry:
    fields = {"pool": machine.pool, "gpu": machine.gpu, "gpus": len(machine.inventory.gpus), "address": machine.address}
    return _audit_entry(action, machine.name, fields, principal, now_s)


def _audit_entry(action: str, subject: str, values: dict[str, Any], principal: Principal, now_s: float) -> AuditEntry:
    """Return the entry of a creation, whose fields are new, or of a removal, whose fields are gone."""
    before, after = (None, values) if action.startswith(("Create", "Join")) else (values, None)
    return new_audit_entry(principal, now_s, action, subject, before=before, after=after)
