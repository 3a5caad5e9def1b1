"""Quarantine of nodes that fail or slow several jobs, until an operator releases them.

Only faults of the machine count. The limits keep one cause from emptying a fleet: an outage that hits several nodes at
once counts for none of them, a job that hangs on several nodes for none of them either, one owner's jobs can
quarantine one node at a time, and a pool loses at most a quarter of its nodes,
but never its only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from scheduler.domain.events import EventCode
from scheduler.domain.fleet import IncidentKind, Node, NodeIncident
from scheduler.domain.job import Job
from scheduler.domain.observation import FailureCause, Run, RunPhase
from scheduler.scheduling.mutable_snapshot import MutableSnapshot

QUARANTINE_JOBS = 3
"""Different jobs that a node must have failed or slowed."""
INCIDENT_WINDOW_S = 86_400.0
SHARED_LOSS_S = 60.0
"""Losses of several nodes within this time have a common cause, such as a network."""
POOL_SHARE_MAX = 0.25
_INCIDENTS_MAX = 20


def record_incidents(snapshot: MutableSnapshot, job: Job, run: Run) -> None:
    """Record that the suspected nodes of an ended run have failed its job."""
    is_hang = run.cause is FailureCause.HANG
    if run.phase is RunPhase.LOST or (run.phase is RunPhase.FAILED and is_hang):
        kind = IncidentKind.HANG if is_hang else IncidentKind.LOSS
        for name in run.suspects:
            add_incident(snapshot, job, kind, name, detail=run.reason, steps=run.steps or 0.0)


def record_straggler(snapshot: MutableSnapshot, job: Job, run: Run) -> None:
    """Record the straggler of a live run once per generation and node, with an event that holds the evidence."""
    straggler = run.straggler
    node = None if straggler is None else snapshot.nodes.get(straggler.node)
    if straggler is None or node is None or find_straggler_incident(node, job) is not None:
        return
    detail = (
        f"rank {straggler.rank} on node {node.name} takes {straggler.ratio:.1f} times as long as the other ranks for "
        f"the same computation ({straggler.probe_s * 1e3:.1f} ms, others {straggler.others_s * 1e3:.1f} ms)"
    )
    add_incident(snapshot, job, IncidentKind.STRAGGLER, node.name, detail=detail, steps=run.steps or 0.0)
    numbers = {"rank": float(straggler.rank), "probe_s": straggler.probe_s, "others_s": straggler.others_s}
    snapshot.record_event(EventCode.JOB_STRAGGLER, job.id, detail, numbers)


def find_straggler_incident(node: Node, job: Job) -> NodeIncident | None:
    """Return the incident that flags the node as slow for the job's current generation, or None."""
    wanted = (IncidentKind.STRAGGLER, job.id, job.allocation.generation)
    found = (each for each in node.incidents if (each.kind, each.job_id, each.generation) == wanted)
    return next(found, None)


def add_incident(
    snapshot: MutableSnapshot, job: Job, kind: IncidentKind, name: str, *, detail: str, steps: float
) -> None:
    """Record an incident of a node, in place of an earlier one of the same kind and job."""
    node = snapshot.nodes.get(name)
    if node is None:
        return
    incident = NodeIncident(
        kind=kind,
        job_id=job.id,
        owner=job.owner_key,
        at_s=snapshot.now_s,
        generation=job.allocation.generation,
        steps=steps,
        detail=detail,
        is_confirmed=kind is not IncidentKind.HANG,
    )
    others = [known for known in node.incidents if (known.kind, known.job_id) != (kind, job.id)]
    snapshot.nodes[name] = replace(node, incidents=(*others[1 - _INCIDENTS_MAX :], incident))


def quarantine_nodes(snapshot: MutableSnapshot) -> None:
    """Drop old incidents, confirm hangs, and quarantine the nodes that have failed too many jobs."""
    names = sorted(snapshot.original.index.with_incidents | snapshot.nodes.changed_keys)
    nodes = [node for name in names if (node := snapshot.nodes.get(name)) is not None and node.incidents]
    open_nodes = [_refresh(snapshot, node) for node in nodes if not node.quarantine]
    all_nodes = [*open_nodes, *(node for node in nodes if node.quarantine)]
    for node in open_nodes:
        incidents = list(_list_counted(node, all_nodes, snapshot.now_s))
        jobs = {incident.job_id for incident in incidents}
        if len(jobs) >= QUARANTINE_JOBS and _is_allowed(snapshot, node, incidents):
            _quarantine(snapshot, node, incidents)


def _refresh(snapshot: MutableSnapshot, node: Node) -> Node:
    """Return the node without incidents that are too old, and with those confirmed that have proven true."""
    incidents = tuple(
        incident if incident.is_confirmed else replace(incident, is_confirmed=_has_recovered(snapshot, node, incident))
        for incident in node.incidents
        if incident.at_s > snapshot.now_s - INCIDENT_WINDOW_S
    )
    if incidents != node.incidents:
        node = snapshot.nodes[node.name] = replace(node, incidents=incidents)
    return node


def _has_recovered(snapshot: MutableSnapshot, node: Node, incident: NodeIncident) -> bool:
    """Return whether the job has gone on without the node where it hung."""
    job = snapshot.jobs.get(incident.job_id)
    if job is None or not job.is_placed or not job.progress.is_reported:
        return False
    return (
        job.allocation.generation > incident.generation
        and node.name not in job.allocation.held
        and job.progress.steps > incident.steps
    )


def _list_counted(node: Node, all_nodes: Iterable[Node], now_s: float) -> Iterator[NodeIncident]:
    """Yield the incidents for which the node is to blame."""
    others = [incident for other in all_nodes if other.name != node.name for incident in other.incidents]
    for incident in node.incidents:
        same_kind = [other for other in others if other.kind is incident.kind]
        if incident.kind is IncidentKind.LOSS:
            is_shared = any(abs(other.at_s - incident.at_s) < SHARED_LOSS_S for other in same_kind)
            if not is_shared and now_s - incident.at_s >= SHARED_LOSS_S:
                yield incident
        elif incident.is_confirmed and all(other.job_id != incident.job_id for other in same_kind):
            yield incident


def _is_allowed(snapshot: MutableSnapshot, node: Node, incidents: Iterable[NodeIncident]) -> bool:
    """Return whether the limits per owner and per pool permit another quarantine."""
    owners = {incident.owner for incident in incidents}
    pool = [other for other in snapshot.nodes.values() if other.pool == node.pool]
    quarantined = [other for other in pool if other.quarantine]
    allowed = max(1, int(POOL_SHARE_MAX * len(pool))) if len(pool) > 1 else 0
    if len(quarantined) >= allowed:
        return False
    by_owner = [{incident.owner for incident in other.incidents} for other in quarantined]
    return len(owners) > 1 or all(other != owners for other in by_owner)


def _quarantine(snapshot: MutableSnapshot, node: Node, incidents: list[NodeIncident]) -> None:
    described = ", ".join(f"{each.job_id} ({each.kind})" for each in incidents)
    jobs = len({incident.job_id for incident in incidents})
    reason = f"it failed or slowed {jobs} jobs within {INCIDENT_WINDOW_S / 3600.0:.0f} h: {described}"
    snapshot.nodes[node.name] = replace(
        node, cordoned=True, draining=True, quarantine=reason, incidents=tuple(incidents)
    )
    message = f"node {node.name} is quarantined: {reason}"
    snapshot.record_event(EventCode.NODE_QUARANTINED, node.name, message, {"jobs": float(jobs)})
