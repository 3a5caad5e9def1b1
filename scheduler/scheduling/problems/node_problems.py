"""Problems of nodes and machines: down, quarantined, slow, or with a silent agent."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.domain.fleet import IncidentKind, Node, NodeState
from scheduler.domain.machine import Machine
from scheduler.domain.problems import Problem, ProblemCode, Severity, SubjectKind
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.scheduling.problems.sentences import describe_count, join_counts
from scheduler.scheduling.quarantine import find_straggler_incident

AGENT_SILENT_S = 300.0
"""Agents report every few seconds. Shorter gaps are restarts of an agent or of the API, which need no action."""


def find_node_problems(snapshot: Snapshot, evidence: Evidence) -> Iterator[Problem]:
    machines = {node: machine for machine in evidence.machines if machine.is_live for node in machine.nodes}
    index = snapshot.index
    for name in index.down:
        yield _describe_down_node(snapshot.nodes[name], machines.get(name), evidence)
    for name in index.with_incidents | index.draining:
        node = snapshot.nodes[name]
        if node.quarantine and node.state is NodeState.UP:
            yield _describe_quarantine(node)
        elif node.state is NodeState.UP:
            yield from _find_slow_node(node, snapshot)
    for machine in evidence.machines:
        if _is_silent(machine, evidence.now_s) and not _is_known_down(machine, snapshot):
            yield _describe_silent_agent(machine)


def _describe_down_node(node: Node, machine: Machine | None, evidence: Evidence) -> Problem:
    is_silent = machine is not None and _is_silent(machine, evidence.now_s)
    silent = f"; the agent of machine {machine.name} is silent" if machine is not None and is_silent else ""
    advice = "Start its agent or the machine." if silent else "Repair the machine, or delete the node if it is gone."
    return Problem(
        ProblemCode.NODE_DOWN,
        Severity.WARNING,
        SubjectKind.NODE,
        node.name,
        f"Node {node.name} of pool {node.pool} is down with {describe_count(node.gpus, 'GPU')}{silent}.",
        advice,
        f"ebbtide events {node.name}",
        since_s=evidence.down_since_s.get(node.name),
        numbers={"gpus": float(node.gpus)},
    )


def _describe_quarantine(node: Node) -> Problem:
    kinds = [incident.kind for incident in node.incidents]
    nouns = {IncidentKind.HANG: "hang", IncidentKind.LOSS: "loss", IncidentKind.STRAGGLER: "slowdown"}
    counts = {noun: kinds.count(kind) for kind, noun in nouns.items()}
    because = f" after {join_counts(counts)}" if kinds else ""
    return Problem(
        ProblemCode.NODE_QUARANTINED,
        Severity.WARNING,
        SubjectKind.NODE,
        node.name,
        f"Node {node.name} of pool {node.pool} is quarantined{because}; its {node.gpus} GPUs take no jobs.",
        "Test its hardware, then release it.",
        f"ebbtide uncordon {node.name}",
        since_s=max((incident.at_s for incident in node.incidents), default=None),
        numbers={"gpus": float(node.gpus), "incidents": float(len(kinds))},
    )


def _find_slow_node(node: Node, snapshot: Snapshot) -> Iterator[Problem]:
    """Yield a problem if the node slows jobs now: incidents of earlier generations of a job are history."""
    candidates = (snapshot.jobs.get(each.job_id) for each in node.incidents if each.kind is IncidentKind.STRAGGLER)
    placed = {job.id: job for job in candidates if job is not None and node.name in job.allocation.target}
    found = [incident for job in placed.values() if (incident := find_straggler_incident(node, job)) is not None]
    if not found:
        return
    gpus = sum(placed[incident.job_id].allocation.target_gpus for incident in found)
    yield Problem(
        ProblemCode.NODE_SLOW,
        Severity.WARNING,
        SubjectKind.NODE,
        node.name,
        f"Node {node.name} of pool {node.pool} computes more slowly than others and holds back "
        f"{describe_count(len(found), 'job')} on {describe_count(gpus, 'GPU')}.",
        "Move its jobs to other nodes and test its hardware.",
        f"ebbtide drain {node.name}",
        since_s=min(incident.at_s for incident in found),
        numbers={"jobs": float(len(found)), "gpus": float(gpus)},
    )


def _is_silent(machine: Machine, now_s: float) -> bool:
    """Return whether an agent that should report does not. A temporary machine is removed by itself."""
    if not machine.is_live or machine.is_service or machine.is_temporary:
        return False
    return now_s - _last_heard_s(machine) > AGENT_SILENT_S


def _last_heard_s(machine: Machine) -> float:
    return machine.joined_at_s if machine.seen_at_s is None else machine.seen_at_s


def _is_known_down(machine: Machine, snapshot: Snapshot) -> bool:
    """Return whether the problem of the machine's node says it already."""
    return any(name in snapshot.index.down for name in machine.nodes)


def _describe_silent_agent(machine: Machine) -> Problem:
    heard = "never reported" if machine.seen_at_s is None else "stopped reporting"
    return Problem(
        ProblemCode.AGENT_SILENT,
        Severity.WARNING,
        SubjectKind.MACHINE,
        machine.name,
        f"The agent of machine {machine.name} in pool {machine.pool} {heard}.",
        "Start the agent, or remove the machine.",
        f"ebbtide machines get {machine.name}",
        since_s=_last_heard_s(machine),
    )
