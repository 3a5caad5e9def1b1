"""Reports of node agents, one per machine, and what each agent has to do about its runs.

One request carries the state of all runs on the machine. The reply names the runs to prepare, begin, notify, kill and
forget. An agent obeys only the highest leader epoch that it has seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field
from typing_extensions import TypedDict

from api.agent_assignments import NoticeView, checkpoint_notice, find_kill_reason, find_startable_run, select_notice
from api.http.dependencies import MachineNamePath, Service, ServiceDep, create_router, require_machine
from api.identity.authorization import Caller, RouteRule, requires
from api.worker_reports import RANKS_MAX, RankReportDocument, ReportText, StepNumber, to_rank_report
from scheduler.documents.document import Document
from scheduler.domain.job import Job
from scheduler.domain.machine import Machine
from scheduler.domain.observation import AgentReport, BegunRun
from scheduler.domain.run_document import RankSeat, RunDocument
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.worker_token import issue_worker_token
from scheduler.executors.agent_executor import agent_id
from scheduler.executors.rank_launch import assign_rank_slots

router = create_router("machines")

IDLE_POLL_S, BUSY_POLL_S = 2.0, 0.25
"""Pause before the next report: with nothing to do, and while a run starts or ends."""
RUNS_MAX = 512


class RunReportDocument(Document):
    """The runs of one job on one node of the machine."""

    job_id: Annotated[str, Field(min_length=1, max_length=200)] = Field(description="Job that the ranks belong to.")
    node: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="Node that they run on.")
    generation: StepNumber = Field(description="Run of the job that has started last. 0: none.")
    ranks: Annotated[list[RankReportDocument], Field(max_length=RANKS_MAX)] = Field(
        default=[], description="One entry per process of that run on the node. Empty: nothing started."
    )
    failure: ReportText = Field(default="", description="Why the ranks could not be started. Empty: they could.")
    killed: ReportText = Field(default="", description="Why the agent killed the ranks on its own. Empty: it did not.")
    terminated: bool = Field(default=False, description="Whether the agent sent SIGTERM to the ranks.")
    prepared: StepNumber = Field(default=0, description="Newer run that can begin at once. 0: none.")
    master_port: Annotated[int, Field(strict=True, ge=0, le=65535)] = Field(
        default=0, description="Port reserved for the store of the prepared run. 0: the node does not hold rank 0."
    )


class MachineReportDocument(Document):
    """The state of all runs on a machine."""

    runs: Annotated[list[RunReportDocument], Field(max_length=RUNS_MAX)] = Field(
        default=[], description="One entry per job and node with a run that is prepared, alive or not yet recorded."
    )


class MasterView(TypedDict):
    host: Annotated[str, Field(description="Address of the machine that holds rank 0.")]
    port: Annotated[int, Field(description="Port at which rank 0 serves the store of the run.")]


class RunOrderView(TypedDict):
    """What the agent has to do about the runs of one job on one node."""

    job_id: Annotated[str, Field(description="Job that the order is for.")]
    node: Annotated[str, Field(description="Node of the machine that the order is for.")]
    generation: Annotated[
        int,
        Field(description="Newest run that is wanted on the node. The agent discards another prepared run. 0: none."),
    ]
    document: Annotated[
        dict[str, Any] | None, Field(description="Run document of the run to prepare. Null: nothing to prepare.")
    ]
    begin: Annotated[MasterView | None, Field(description="Begin the prepared run, which meets there. Null: wait.")]
    notice: Annotated[NoticeView | None, Field(description="What the live ranks have to do now. Null: continue.")]
    kill: Annotated[str, Field(description="Why the live ranks must be killed now. Empty: they may continue.")]
    is_recorded: Annotated[
        bool, Field(description="Whether the end of the reported run is recorded and can be forgotten.")
    ]


class MachineReplyView(TypedDict):
    """The reply to a machine's report."""

    epoch: Annotated[int, Field(description="Epoch of the leader whose decisions these are.")]
    disconnect_s: Annotated[
        float, Field(description="Seconds without an answered report after which the agent ends its ranks.")
    ]
    poll_after_s: Annotated[float, Field(description="Seconds to wait before the next report.")]
    runs: Annotated[list[RunOrderView], Field(description="One entry per job and node that the agent has to know of.")]


@router.post("/machines/{machine}/report", response_model=MachineReplyView)
@requires(RouteRule(Caller.MACHINES))
def report_machine(
    machine: MachineNamePath, document: MachineReportDocument, request: Request, service: ServiceDep
) -> JSONResponse:
    """Report the state of all runs on a machine. Needs the credential of the machine."""
    reporter, now_s = require_machine(service, request, machine), service.clock.now_s()
    service.machine_contacts.record(reporter.name, now_s)
    lease = service.lease()
    reported = {(run.job_id, run.node): to_agent_report(reporter, run, now_s) for run in document.runs}
    orders = build_orders(service, reporter, reported, now_s)
    is_busy = any(order["document"] or order["begin"] or order["notice"] or order["kill"] for order in orders)
    is_busy |= any(report.prepared or report.has_living_ranks is False for report in reported.values())
    reply: MachineReplyView = {
        "epoch": 0 if lease is None else lease.epoch,
        "disconnect_s": service.settings.disconnect_s,
        "poll_after_s": BUSY_POLL_S if is_busy else IDLE_POLL_S,
        "runs": orders,
    }
    return JSONResponse(reply)  # skips validation, as for the agents of pods


def build_orders(
    service: Service, machine: Machine, reported: Mapping[tuple[str, str], AgentReport], now_s: float
) -> list[RunOrderView]:
    """Record the reports of live jobs, and return the orders for all runs that are reported or wanted."""
    snapshot = service.agent_state.snapshot(now_s)
    wanted = {
        (job_id, node): AgentReport(job_id, node, agent_id(machine), now_s, since_s=now_s)
        for node in machine.nodes
        for job_id in set(snapshot.index.holders.get(node, {}).values())
    }
    orders = []
    for (job_id, node), report in (wanted | dict(reported)).items():
        job = service.agent_state.job(job_id, now_s)
        if job is not None and not job.is_ended and (job_id, node) in reported:
            service.agent_state.record_report(report)
        begun = service.agent_state.begun_runs(job_id, now_s)
        orders.append(_build_order(service, snapshot, job, begun, report, now_s))
    return orders


def _build_order(
    service: Service,
    snapshot: Snapshot,
    job: Job | None,
    begun: tuple[BegunRun, ...],
    report: AgentReport,
    now_s: float,
) -> RunOrderView:
    order: RunOrderView = {
        "job_id": report.job_id,
        "node": report.node,
        "generation": 0,
        "document": None,
        "begin": None,
        "notice": None,
        "kill": "",
        "is_recorded": _is_recorded(job, begun, report),
    }
    if job is None or job.is_ended:
        order["kill"] = "its job is gone" if report.has_living_ranks else ""
        return order
    allocation = job.allocation
    order["generation"] = allocation.generation if report.node in allocation.target else 0
    order["kill"] = find_kill_reason(begun, report)
    if report.has_living_ranks:
        order["notice"] = select_notice(
            job, report.generation, now_s, service.agent_state, prepared=allocation.generation
        ) or checkpoint_notice(job, report)
    run = find_startable_run(begun, report)
    if run is not None and report.generation < run.generation == report.prepared and run.master is not None:
        order["begin"] = {"host": run.master.host, "port": run.master.port}
    elif max(report.generation, report.prepared) < order["generation"]:
        order["document"] = build_run_document(job, snapshot, report.node, secret=service.token_secret).to_document()
    return order


def _is_recorded(job: Job | None, begun: Iterable[BegunRun], report: AgentReport) -> bool:
    """Return whether nobody needs to hear of the reported run any more."""
    if report.has_living_ranks:
        return False
    run = next((run for run in begun if run.generation == report.generation), None)
    return job is None or job.is_ended or run is None or run.end is not None


def build_run_document(job: Job, snapshot: Snapshot, node: str, *, secret: bytes) -> RunDocument:
    """Return the job's current generation on `node`. The agent fills in the URL under which it reaches the API."""
    spec, allocation = job.spec, job.allocation
    slots = assign_rank_slots(snapshot.rank_placement(allocation))
    nodes = list(dict.fromkeys(slot.node for slot in slots))
    checkpoint = spec.checkpoint
    return RunDocument(
        job_id=job.id,
        owner=job.owner,
        node=node,
        generation=allocation.generation,
        command=spec.command,
        nodes=len(nodes),
        node_rank=nodes.index(node),
        world_size=len(slots),
        ranks=tuple(RankSeat(slot.rank, slot.local_rank, slot.gpu) for slot in slots if slot.node == node),
        launch=spec.program.launch,
        archive=spec.program.archive,
        setup=spec.program.setup,
        venv=spec.program.venv,
        env=spec.env,
        plan=allocation.plan,
        steps=spec.steps,
        frozen_layers=job.freezing.layers,
        checkpoint_dir=checkpoint.dir,
        checkpoint_step=int(job.progress.checkpoint_steps),
        checkpoint_interval_s=checkpoint.interval_s,
        checkpoint_keep=checkpoint.keep,
        token=issue_worker_token(secret, job.id, allocation.generation),
    )


def to_agent_report(machine: Machine, run: RunReportDocument, now_s: float) -> AgentReport:
    return AgentReport(
        job_id=run.job_id,
        node=run.node,
        pod=agent_id(machine),
        at_s=now_s,
        generation=run.generation,
        ranks=tuple(to_rank_report(number, rank) for number, rank in enumerate(run.ranks)),
        failure=run.failure,
        killed=run.killed,
        terminated=run.terminated,
        since_s=now_s,
        prepared=run.prepared,
        master_port=run.master_port,
    )
