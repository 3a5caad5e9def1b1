"""Departure of temporary machines: their nodes are drained while their ranks save, then their credential is revoked.

The controller removes the nodes once no job holds their GPUs (`scheduler.runtime.departed_machines`).
"""

from __future__ import annotations

from fastapi import Request

from api.http.dependencies import MachineNamePath, Service, ServiceDep, create_router, require_machine
from api.http.errors import ProblemError, problem_responses, raise_not_found
from api.identity.authorization import Caller, RouteRule, requires
from api.machines import MachineView, machine_audit_entry, machine_principal, machine_view
from api.state import load_request_context
from scheduler.domain.commands import CordonNode
from scheduler.domain.machine import Machine

router = create_router("machines")


@router.post("/machines/{name}/leave", responses=problem_responses(409))
@requires(RouteRule(Caller.MACHINES))
def leave_machine(name: MachineNamePath, request: Request, service: ServiceDep) -> MachineView:
    """Revoke the credential of a temporary machine whose ranks have ended. Needs this credential.

    The node is removed once no job holds its GPUs.
    """
    machine, now_s = require_machine(service, request, name), service.clock.now_s()
    if not machine.is_temporary:
        detail = f"machine {name} is not temporary. Run `ebbtide machines remove {name}` to remove it"
        raise ProblemError(409, "conflict", detail)
    entry = machine_audit_entry("RevokeMachine", machine, machine_principal(machine.name), now_s)
    revoked = service.store.machines.revoke_machine(name, now_s, entry)
    service.machine_credentials.forget()
    return machine_view(revoked or raise_not_found("machine", name), None)


def drain_leaving_nodes(service: Service, machine: Machine) -> None:
    """Drain the nodes of a machine that leaves, unless they are drained already."""
    now_s = service.clock.now_s()
    context = load_request_context(service.state_reader, service.store, now_s, machine_principal(machine.name))
    for name in machine.nodes:
        node = context.snapshot.nodes.get(name)
        if node is not None and not node.draining:
            context = context.send(CordonNode(name, drain=True))
