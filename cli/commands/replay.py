"""`ebbtide replay`: runs one scheduling cycle on a saved snapshot and checks its decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.inputs import input_errors_from, read_json
from cli.output import (
    OutputFormat,
    OutputOption,
    format_duration,
    format_gpus,
    format_time,
    print_document,
    render_facts,
    render_table,
    stack,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.domain.snapshot import Snapshot
    from scheduler.domain.tick_report import TickResult, Violation


SnapshotArgument = Annotated[
    str, typer.Argument(metavar="SNAPSHOT.json", help="Snapshot from `ebbtide snapshot`; - reads stdin.")
]
PolicyOption = Annotated[str, typer.Option("--policy", help="Policy set that makes the decisions.")]


def replay(
    snapshot_file: SnapshotArgument, policy: PolicyOption = "ebbtide", output: OutputOption = OutputFormat.TABLE
) -> None:
    """Run one scheduling cycle on a saved snapshot. Shows the decisions with their reasons; changes nothing."""
    from scheduler.scheduling.policy_sets import load_policy_set
    from scheduler.scheduling.scheduler import decide

    with input_errors_from("--policy"):
        policies = load_policy_set(policy)
    snapshot = read_snapshot(snapshot_file)
    result = decide(snapshot, policies)
    violations = find_violations(snapshot, result)
    print_document(
        _to_document(snapshot, policy, result, violations),
        output,
        lambda: _render_replay(snapshot, policy, result, violations),
    )


def read_snapshot(source: str) -> Snapshot:
    """Return the snapshot in a file. Raises InputError that names the invalid field."""
    from scheduler.domain.codec import decode
    from scheduler.domain.snapshot import Snapshot

    with input_errors_from(source):
        snapshot = decode(Snapshot, read_json(source))
        _check_references(snapshot)
    return snapshot


def _check_references(snapshot: Snapshot) -> None:
    """Check that every node, pool and GPU that the snapshot refers to is in it. Raises ValueError."""
    for name, node in snapshot.nodes.items():
        _require_known(f"$.nodes.{name}.pool", node.pool, snapshot.pools, "pools")
    for name, loan in snapshot.loans.items():
        _require_known(f"$.loans.{name}.node", loan.node, snapshot.nodes, "nodes")
        _require_known(f"$.loans.{name}.pool", loan.pool, snapshot.pools, "pools")
    for job_id, job in snapshot.jobs.items():
        for part in ("target", "releasing"):
            for node_name, indices in getattr(job.allocation, part).items():
                path = f"$.jobs.{job_id}.allocation.{part}"
                _require_known(path, node_name, snapshot.nodes, "nodes")
                gpu_count = snapshot.nodes[node_name].gpus
                if not all(0 <= index < gpu_count for index in indices):
                    raise ValueError(f"{path}.{node_name}: {list(indices)} names a GPU outside 0 to {gpu_count - 1}")
    for what in ("demand", "forecasts"):
        for pool in getattr(snapshot, what):
            _require_known(f"$.{what}", pool, snapshot.pools, "pools")


def _require_known(path: str, name: str, known: Any, noun: str) -> None:
    if name not in known:
        raise ValueError(f"{path}: {name!r} is not in the snapshot's {noun}")


def find_violations(snapshot: Snapshot, result: TickResult) -> tuple[Violation, ...]:
    """Return the violations of decisions. Each decision is checked after the legal decisions before it."""
    from scheduler.scheduling.desired_state import apply_decision
    from scheduler.scheduling.legality import find_violation
    from scheduler.scheduling.mutable_snapshot import MutableSnapshot

    draft, found = MutableSnapshot(snapshot), []
    for decision in result.decisions:
        violation = find_violation(draft, decision)
        if violation is None:
            apply_decision(draft, decision)
        else:
            found.append(violation)
    return tuple(found)


def _to_document(
    snapshot: Snapshot, policy: str, result: TickResult, violations: tuple[Violation, ...]
) -> dict[str, Any]:
    from scheduler.domain.codec import encode, encode_as
    from scheduler.domain.decisions import Decision

    return {
        "generation": snapshot.generation,
        "now_s": snapshot.now_s,
        "policy": policy,
        "decisions": [encode_as(Decision, decision) for decision in result.decisions],
        "waiting": {job_id: encode(reason) for job_id, reason in result.waiting.items()},
        "violations": [encode(violation) for violation in violations],
        "wanted_shapes": [{"curve_key": w.curve_key, "shape": str(w.shape)} for w in result.wanted_shapes],
        "next_wake_s": result.next_wake_s,
        "full_pass": result.full_pass,
    }


def _render_replay(
    snapshot: Snapshot, policy: str, result: TickResult, violations: tuple[Violation, ...]
) -> RenderableType:
    from rich.text import Text

    from scheduler.domain.decisions import decision_subject

    head = render_facts(
        {
            "snapshot": f"generation {snapshot.generation} at {format_time(snapshot.now_s)} UTC",
            "policy": policy,
            "next tick": f"in {format_duration(result.next_wake_s - snapshot.now_s)}",
        }
    )
    decided = render_table(
        (
            [type(d).__name__, decision_subject(d), _describe_change(d), d.reason.code, d.reason.detail]
            for d in result.decisions
        ),
        headers=["decision", "subject", "change", "reason", "detail"],
        empty="No decisions.",
    )
    waiting = render_table(
        ([job_id, reason.code, reason.detail] for job_id, reason in result.waiting.items()),
        headers=["pending job", "reason", "detail"],
        empty="No pending jobs.",
    )
    broken = render_table(
        ([violation.subject, violation.invariant, violation.detail] for violation in violations),
        headers=["violation by", "rule", "detail"],
        empty="No violations.",
    )
    return stack(head, Text(), decided, Text(), waiting, Text(), broken)


def _describe_change(decision: Any) -> str:
    """Format a decision's GPUs and plan, or its deadline, or nothing."""
    from scheduler.domain import gpu_sets

    if hasattr(decision, "gpus"):
        count = format_gpus(gpu_sets.count(decision.gpus))
        return f"{count} {gpu_sets.format_gpus(decision.gpus)}, {decision.plan.summarize()}"
    for deadline in ("leave_by_s", "return_by_s"):
        if hasattr(decision, deadline):
            return f"by {format_time(getattr(decision, deadline))}"
    return ""
