"""JSON views of events, decisions, reasons and snapshots."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from api.http.paging import GpusByNode
from api.plans import PlanView
from api.recalls import RecallChoiceView
from scheduler.domain.codec import encode
from scheduler.domain.decisions import Reason, ReasonCode, decision_subject
from scheduler.domain.events import EventCode
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import StoredDecision, StoredEvent


class ReasonView(TypedDict):
    """The reason of a decision, or of a pending job."""

    code: Annotated[ReasonCode, Field(description="CamelCase word to compare. Its meaning never changes.")]
    detail: Annotated[str, Field(description="One sentence for people. The wording can change between releases.")]
    numbers: Annotated[dict[str, float], Field(description="Figures of the sentence by name, such as `needed_gpus`.")]


class EventView(TypedDict):
    """Something that happened."""

    number: Annotated[int, Field(description="Position in the log. Numbers ascend and never repeat.")]
    generation: Annotated[int, Field(description="Snapshot that a tick committed together with the event.")]
    at_s: Annotated[float, Field(description="Time of the event, in seconds since 1970 (UTC).")]
    code: Annotated[EventCode, Field(description="Type of event, in CamelCase. Its meaning never changes.")]
    subject: Annotated[
        str, Field(description="Job id, or name of the node, pool, queue or loan that the event is about.")
    ]
    message: Annotated[str, Field(description="One sentence for people. The wording can change between releases.")]
    numbers: Annotated[dict[str, float], Field(description="Figures of the message by name, such as `gpus`.")]
    cause: Annotated[
        str,
        Field(
            description=(
                "One word: the cause of lost work, the code of a decision's reason, a job's new state, or the outcome "
                "of a recall. Empty: none."
            )
        ),
    ]


class DecisionBodyView(TypedDict):
    """A decision. The decision's `kind` determines which fields are present."""

    reason: Annotated[ReasonView, Field(description="Why the tick decided this.")]
    job_id: NotRequired[Annotated[str, Field(description="Job that the decision changes. Absent: it is about a node.")]]
    node: NotRequired[Annotated[str, Field(description="Node that the decision changes. Absent: it is about a job.")]]
    gpus: NotRequired[Annotated[GpusByNode, Field(description="GPU indices by node that the job gets.")]]
    plan: NotRequired[Annotated[PlanView, Field(description="Parallel plan of the job on these GPUs.")]]
    seats: NotRequired[
        Annotated[
            list[tuple[str, int]],
            Field(description="Node and GPU index of each rank, in rank order. Empty: the default order."),
        ]
    ]
    leave_by_s: NotRequired[
        Annotated[float, Field(description="Deadline for workers to leave, in seconds since 1970 (UTC).")]
    ]
    return_by_s: NotRequired[
        Annotated[float, Field(description="Deadline for training to leave the node, in seconds since 1970 (UTC).")]
    ]
    choice: NotRequired[
        Annotated[
            RecallChoiceView | None,
            Field(description="Why the recalled node was chosen. Null: the reason names the node."),
        ]
    ]


class DecisionView(TypedDict):
    """A stored decision of a tick."""

    number: Annotated[int, Field(description="Position in the log. Numbers ascend and never repeat.")]
    generation: Annotated[int, Field(description="Snapshot that the tick committed with the decision.")]
    at_s: Annotated[float, Field(description="Time of the tick, in seconds since 1970 (UTC).")]
    kind: Annotated[
        str, Field(description="Type in CamelCase, such as `StartJob`, `ResizeJob`, `PreemptJob` or `LendNode`.")
    ]
    subject: Annotated[str, Field(description="Id of the job, or name of the node, that was changed.")]
    decision: Annotated[DecisionBodyView, Field(description="What was decided, and why.")]


class SnapshotView(TypedDict):
    """The whole live state in the domain's own encoding, as `ebbtide replay` reads it."""

    generation: Annotated[int, Field(description="Number of this state. Each commit increments it.")]
    now_s: Annotated[float, Field(description="Time of the tick that committed it, in seconds since 1970 (UTC).")]
    pools: Annotated[dict[str, dict[str, Any]], Field(description="Pools with their lending policies, by name.")]
    nodes: Annotated[dict[str, dict[str, Any]], Field(description="Nodes with their GPUs and observed usage, by name.")]
    jobs: Annotated[dict[str, dict[str, Any]], Field(description="Live jobs, by id.")]
    loans: Annotated[dict[str, dict[str, Any]], Field(description="Live loans, by name of the lent node.")]
    demand: Annotated[
        dict[str, dict[str, Any]], Field(description="Latest demand reading of each inference pool, by pool name.")
    ]
    forecasts: Annotated[
        dict[str, dict[str, Any]], Field(description="Latest demand forecast of each inference pool, by pool name.")
    ]
    curves: Annotated[dict[str, dict[str, Any]], Field(description="Solved scaling curves, by their key.")]
    switches: Annotated[dict[str, bool], Field(description="Operator switches, such as `lending_paused`, by name.")]
    full_pass_at_s: Annotated[
        float | str,
        Field(
            description=(
                "When a tick last considered lending and resizing, in seconds since 1970 (UTC). Text `-inf`: never."
            )
        ),
    ]
    queues: Annotated[dict[str, dict[str, Any]], Field(description="Declared queues with their quota, by name.")]
    solver: Annotated[
        str, Field(description="Fingerprint of the software version that made the curves. Empty: none solved.")
    ]
    gpu_throughputs: Annotated[
        dict[str, float],
        Field(description="Floating-point operations per second of a training step, by GPU profile. Empty: unknown."),
    ]
    run_times: Annotated[
        dict[str, dict[str, Any]],
        Field(description="Run times of the last ended jobs, by `owner NAME`, `queue NAME` and `cluster`."),
    ]
    curve_hardware: Annotated[
        dict[str, str],
        Field(description="Digest of the profile and network that were set, by GPU model, that the curves are for."),
    ]
    return_times: Annotated[
        dict[str, dict[str, Any]],
        Field(description="Measured times in which jobs left recalled nodes and replicas started, by pool."),
    ]
    gpu_profiles: Annotated[
        dict[str, dict[str, Any]], Field(description="GPU profiles that were set on this service, by GPU model.")
    ]
    step_measurements: Annotated[
        dict[str, dict[str, Any]],
        Field(description="Measured over predicted steps of plans, by GPU profile and model."),
    ]
    shadows: Annotated[
        dict[str, dict[str, Any]], Field(description="Loans that pools in shadow mode would have made, by pool name.")
    ]
    lending_set_by: Annotated[str, Field(description="Display name of who last set a switch of lending. Empty: none.")]
    lending_set_at_s: Annotated[
        float | None, Field(description="When that was, in seconds since 1970 (UTC). Null: never, or unknown.")
    ]
    recalls: Annotated[
        dict[str, dict[str, Any]], Field(description="Open receipts of recalls, by name of the recalled node.")
    ]


def reason_view(reason: Reason) -> ReasonView:
    return {"code": reason.code, "detail": reason.detail, "numbers": dict(reason.numbers)}


def event_view(stored: StoredEvent) -> EventView:
    event = stored.event
    return {
        "number": stored.number,
        "generation": stored.generation,
        "at_s": event.at_s,
        "code": event.code,
        "subject": event.subject,
        "message": event.message,
        "numbers": dict(event.numbers),
        "cause": event.cause,
    }


def decision_view(stored: StoredDecision) -> DecisionView:
    return {
        "number": stored.number,
        "generation": stored.generation,
        "at_s": stored.at_s,
        "kind": type(stored.decision).__name__,
        "subject": decision_subject(stored.decision),
        "decision": encode(stored.decision),
    }


def snapshot_view(snapshot: Snapshot) -> SnapshotView:
    view: SnapshotView = encode(snapshot)
    return view
