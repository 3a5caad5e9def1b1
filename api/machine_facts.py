"""Facts of a machine that its agent states again at each start: version, containment, address and hardware."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request

from api.http.dependencies import MachineNamePath, Service, ServiceDep, create_router, require_machine
from api.http.errors import problem_responses
from api.identity.audit import new_audit_entry
from api.identity.authorization import Caller, RouteRule, requires
from api.machines import (
    MachineView,
    build_node,
    check_agent,
    choose_profile,
    lacks_gpus,
    machine_principal,
    machine_view,
    read_inventory,
)
from api.state import load_request_context
from scheduler.documents.machine import MachineFactsDocument
from scheduler.domain.commands import CordonNode
from scheduler.domain.fleet import Node
from scheduler.domain.machine import Machine

router = create_router("machines")


@router.put("/machines/{name}/facts", responses=problem_responses(409))
@requires(RouteRule(Caller.MACHINES))
def update_machine_facts(
    name: MachineNamePath, document: MachineFactsDocument, request: Request, service: ServiceDep
) -> MachineView:
    """Replace what the service knows of a machine. Needs its credential; an agent calls it at each start.

    The version rule of joining applies. The node of the machine stays as it was registered. If GPUs of the node are
    gone, or are of another model, the node is drained.
    """
    stored, now_s = require_machine(service, request, name), service.clock.now_s()
    check_agent(document, now_s)
    inventory = read_inventory(document, may_lack_gpus=stored.is_service)
    machine = replace(
        stored,
        gpu="" if stored.is_service else choose_profile(name, inventory, service, now_s),
        address=document.address,
        agent_version=document.version,
        containment=document.containment,
        inventory=inventory,
    )
    audit = None
    if machine != stored:
        fields = ("gpu", "address", "agent_version", "containment")
        before, after = ({name: getattr(each, name) for name in fields} for each in (stored, machine))
        audit = new_audit_entry(machine_principal(name), now_s, "ChangeMachine", name, before=before, after=after)
    service.store.machines.update_machine(machine, audit)
    service.machine_credentials.forget()
    node = None if machine.is_service else _drain_incomplete_node(machine, service, now_s)
    return machine_view(machine, node)


def _drain_incomplete_node(machine: Machine, service: Service, now_s: float) -> Node | None:
    """Drain the machine's node if it promises GPUs that are gone. Return the node, None if it was deleted."""
    context = load_request_context(service.state_reader, service.store, now_s, machine_principal(machine.name))
    node = context.snapshot.nodes.get(machine.name)
    if node is not None and not node.draining and lacks_gpus(build_node(machine), node):
        context.send(CordonNode(node.name, drain=True))
    return node
