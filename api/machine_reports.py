"""Reports of node agents, one per machine, and what each agent has to do about its runs.

One request carries the state of all runs on the machine. The reply names the runs to prepare, begin, notify, kill and
forget. An agent acts only on replies of the highest leader epoch that it has seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from api.agent_assignments import NoticeView, checkpoint_notice, find_kill_reason, find_startable_run, select_notice
from api.http.dependencies import (
    MachineNamePath,
    Service,
    ServiceDep,
    create_router,
    require_machine,
    with_hosted_nodes,
)
from api.identity.authorization import Caller, RouteRule, requires
from api.machine_departure import drain_leaving_nodes
from api.machine_logs import claim_logs
from api.worker_reports import RANKS_MAX, ByteCount, RankReportDocument, ReportText, StepNumber, to_rank_report
from scheduler.documents.document import Document
from scheduler.domain.fleet import PROCESSOR_SLOTS
from scheduler.domain.job import Job
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.machine import Machine
from scheduler.domain.observation import AgentReport, BegunRun
from scheduler.domain.owner_ids import OIDC_PREFIX
from scheduler.domain.run_document import RankSeat, RunDocument
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.worker_token import issue_worker_token
from scheduler.executors.agent_executor import agent_id
from scheduler.executors.rank_slots import assign_rank_slots
from scheduler.executors.reported_runs import AgentKey

router = create_router("machines")

POLL_S = 0.1
"""Pause of the agent between a reply and its next report. The reply itself waits until there is something to do."""
STEADY_RECHECK_S, CHANGING_RECHECK_S = 1.0, 0.2
"""Pause between two looks at what a machine with runs has to do: while they go on, and while one starts or ends."""
WAIT_S_MAX = 60.0
ReplyT = TypeVar("ReplyT", bound="AgentReplyView")
RUNS_MAX = 512


class RunReportDocument(Document):
    """The runs of one job on one node of the machine."""

    job_id: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="Id of the job whose ranks these are."
    )
    node: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="One of the machine's nodes, where the ranks run."
    )
    generation: StepNumber = Field(description="Run of the job that has started last. 0: none.")
    ranks: Annotated[list[RankReportDocument], Field(max_length=RANKS_MAX)] = Field(
        default=[], description="One entry per process of that run on the node. Empty: nothing started."
    )
    failure: ReportText = Field(default="", description="Why the ranks could not be started. Empty: they could.")
    permanent_fault: PermanentFault | None = Field(
        default=None, description="Why another start cannot succeed either. Null: it may."
    )
    killed: ReportText = Field(default="", description="Why the agent killed the ranks on its own. Empty: it did not.")
    machine_fault: bool = Field(
        default=False, description="Whether `killed` is a fault of the machine, such as the loss of a supervisor."
    )
    terminated: bool = Field(default=False, description="Whether the agent sent SIGTERM to the ranks.")
    checkpoint_age_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="Seconds since the last file that matches `checkpoint.path` of the job was complete. Null: the "
        "run has written none.",
    )
    saved: bool = Field(
        default=False, description="Whether such a file was complete after the ranks were asked to leave."
    )
    exceeded_memory: ByteCount | None = Field(
        default=None,
        description="Memory limit of the run on the node in bytes, for which the kernel has killed a process. Null: it "
        "has not.",
    )
    prepared: StepNumber = Field(default=0, description="Newer run that can begin at once. 0: none.")
    setting_up: StepNumber = Field(
        default=0, description="Newer run whose setup command the machine runs, or fetches the archive for. 0: none."
    )
    master_port: Annotated[int, Field(strict=True, ge=0, le=65535)] = Field(
        default=0, description="Port reserved for the store of the prepared run. 0: the node does not hold rank 0."
    )


class RunsReportDocument(Document):
    """The state of all runs of an agent."""

    runs: Annotated[list[RunReportDocument], Field(max_length=RUNS_MAX)] = Field(
        default=[], description="One entry per job and node with a run that is prepared, alive or not yet recorded."
    )
    wait_s: Annotated[float, Field(ge=0, le=WAIT_S_MAX)] = Field(
        default=0.0, description="Seconds that the reply may wait until there is something to do. 0: reply at once."
    )

    @property
    def is_changing(self) -> bool:
        """Whether a run waits for its begin, or has ended."""
        return any(run.prepared or all(rank.exit_code is not None for rank in run.ranks) for run in self.runs)


class MachineReportDocument(RunsReportDocument):
    """The state of all runs on a machine."""

    leaving: ReportText = Field(
        default="", description="Why the machine leaves for good. Its node is drained. Empty: it stays."
    )


class MasterView(TypedDict):
    host: Annotated[str, Field(description="Address of the machine that holds rank 0.")]
    port: Annotated[int, Field(description="Port at which rank 0 serves the store of the run.")]


class RunOrderView(TypedDict):
    """Orders to the agent for the runs of one job on one node."""

    job_id: Annotated[str, Field(description="Id of the job whose ranks the agent starts or ends.")]
    node: Annotated[str, Field(description="One of the machine's nodes, where these ranks run.")]
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


class AgentReplyView(TypedDict):
    """The reply to an agent's report."""

    epoch: Annotated[int, Field(description="Epoch of the leader whose decisions these are.")]
    disconnect_s: Annotated[
        float, Field(description="Seconds without an answered report after which the agent ends its ranks.")
    ]
    waited_s: Annotated[
        float, Field(description="Seconds that this reply waited. The control plane counts them as contact.")
    ]
    poll_after_s: Annotated[float, Field(description="Seconds to wait before the next report.")]
    runs: Annotated[list[RunOrderView], Field(description="One entry per job and node that the agent has to know of.")]


@router.post("/machines/{machine}/report", response_model=AgentReplyView)
@requires(RouteRule(Caller.MACHINES))
async def report_machine(
    machine: MachineNamePath, document: MachineReportDocument, request: Request, service: ServiceDep
) -> JSONResponse:
    """Report the state of all runs on a machine. Needs the credential of the machine.

    The reply waits until there is something to do, at most `wait_s` and a quarter of EBBTIDE_DISCONNECT_S.
    """
    reporter, reports = await run_in_threadpool(_accept_report, service, request, machine, document)
    if not document.runs:
        recheck_after_s = math.inf
    else:
        recheck_after_s = CHANGING_RECHECK_S if document.is_changing else STEADY_RECHECK_S
    reply = await wait_for_orders(
        service,
        lambda: _build_reply(service, reporter, reports),
        has_orders,
        lambda snapshot: _find_version(snapshot, reporter, reports),
        wait_s=document.wait_s,
        recheck_after_s=recheck_after_s,
    )
    # The lease of the ranks counts from the end of the wait, so the recorded contact must not be earlier.
    await run_in_threadpool(service.machine_contacts.record, reporter.name, service.clock.now_s())
    # A JSONResponse skips validation, which costs more than everything else.
    return JSONResponse(reply)


def _accept_report(
    service: Service, request: Request, name: str, document: MachineReportDocument
) -> tuple[Machine, Sequence[AgentReport]]:
    """Return the machine that reports, and its reports. One function, because each change of thread costs as much."""
    machine, now_s = require_machine(service, request, name), service.clock.now_s()
    service.machine_contacts.record(machine.name, now_s)
    if document.leaving:
        drain_leaving_nodes(service, machine)
    return machine, read_reports(document, agent_id(machine), now_s, address=machine.address)


async def wait_for_orders(
    service: Service,
    build_reply: Callable[[], tuple[Snapshot, ReplyT]],
    is_due: Callable[[ReplyT], bool],
    find_version: Callable[[Snapshot], object],
    *,
    wait_s: float,
    recheck_after_s: float,
) -> ReplyT:
    """Return a reply as soon as it is due, or after `wait_s`. Sets its `waited_s`.

    Args:
        build_reply: returns the reply and the snapshot that it follows from.
        is_due: whether a reply must not wait.
        find_version: returns what the orders follow from. A reply is built again when it changes.
        recheck_after_s: time after which a reply is built again in any case: runs can be ended without a decision.
    """
    began_s = time.monotonic()
    deadline_s = began_s + min(wait_s, service.settings.disconnect_s / 4)
    while True:
        snapshot, reply = await run_in_threadpool(build_reply)
        reply["waited_s"] = time.monotonic() - began_s
        if is_due(reply):
            return reply
        version, recheck_s = find_version(snapshot), min(deadline_s, time.monotonic() + recheck_after_s)
        while find_version(snapshot) == version and (left_s := recheck_s - time.monotonic()) > 0:
            snapshot = await service.decision_watch.wait_for_change(snapshot, left_s)
        if time.monotonic() >= deadline_s:
            reply["waited_s"] = time.monotonic() - began_s
            return reply


def has_orders(reply: AgentReplyView) -> bool:
    """Return whether the agent has something to do now."""
    return any(
        order["document"] or order["begin"] or order["notice"] or order["kill"] or order["is_recorded"]
        for order in reply["runs"]
    )


def find_job_version(job: Job | None) -> object:
    """Return what the orders about a job follow from besides the run log."""
    return None if job is None else (job.state, job.allocation, job.pending_checkpoint_request)


def _find_version(snapshot: Snapshot, machine: Machine, reports: Sequence[AgentReport]) -> object:
    """Return what the orders to a machine follow from besides the run log."""
    if machine.is_service:
        return snapshot.generation  # the declarations of its nodes are no part of it
    held = {job for node in machine.nodes for job in snapshot.index.holders.get(node, {}).values()}
    return {job: find_job_version(snapshot.jobs.get(job)) for job in held.union(each.job_id for each in reports)}


def _build_reply(service: Service, machine: Machine, reports: Sequence[AgentReport]) -> tuple[Snapshot, AgentReplyView]:
    """Return the reply, and the snapshot that it follows from."""
    now_s, agent = service.clock.now_s(), agent_id(machine)
    snapshot, epoch = service.agent_state.decisions(now_s)
    machine = with_hosted_nodes(service, machine, snapshot)
    wanted = {
        (job_id, node): AgentReport(job_id, node, agent, now_s, since_s=now_s)
        for node in machine.nodes
        for job_id in set(snapshot.index.holders.get(node, {}).values())
    }
    orders = OrderBuilder(service, snapshot, now_s).build_orders(wanted, reports)
    return snapshot, build_reply(service, epoch, orders, poll_after_s=POLL_S)


def build_reply(service: Service, epoch: int, orders: list[RunOrderView], *, poll_after_s: float) -> AgentReplyView:
    """Return a reply with these orders of the leader with this epoch."""
    return {
        "epoch": epoch,
        "disconnect_s": service.settings.disconnect_s,
        "waited_s": 0.0,
        "poll_after_s": poll_after_s,
        "runs": orders,
    }


@dataclass(frozen=True, slots=True)
class OrderBuilder:
    """Builder of the orders for one agent at one time."""

    service: Service
    snapshot: Snapshot
    now_s: float

    def build_orders(
        self, wanted: Mapping[AgentKey, AgentReport], reports: Iterable[AgentReport]
    ) -> list[RunOrderView]:
        """Record the reports of live jobs, and return the orders for all runs that are reported or wanted.

        Args:
            wanted: an empty report for each job that has GPUs of the agent, by job and node.
        """
        agent_state, now_s = self.service.agent_state, self.now_s
        reported = {(report.job_id, report.node): replace(report, at_s=now_s) for report in reports}
        orders, strangers = [], set[str]()
        for (job_id, node), report in (dict(wanted) | reported).items():
            job, begun = agent_state.job(job_id, now_s), agent_state.begun_runs(job_id, now_s)
            # An agent does not report runs that it has forgotten. Those of a restored database have ended there.
            is_news = (job_id, node) in reported or any(run.is_restored and run.end is None for run in begun)
            if job is not None and _awaits_reports(job) and is_news:
                agent_state.record_report(report)
            if report.has_living_ranks and all(run.generation != report.generation for run in begun):
                strangers.add(node)
            orders.append(self._build_order(job, begun, report))
        for order in orders:
            if order["node"] in strangers:
                order["begin"] = None  # ranks that a restored database does not know may hold the same GPUs
        return orders

    def _build_order(self, job: Job | None, begun: tuple[BegunRun, ...], report: AgentReport) -> RunOrderView:
        order: RunOrderView = {
            "job_id": report.job_id,
            "node": report.node,
            "generation": 0,
            "document": None,
            "begin": None,
            "notice": None,
            "kill": "",
            "is_recorded": self._is_recorded(job, begun, report),
        }
        if job is None or job.is_ended:
            order["kill"] = "its job is gone" if report.has_living_ranks else ""
            return order
        allocation = job.allocation
        order["generation"] = allocation.generation if report.node in allocation.target else 0
        order["kill"] = find_kill_reason(begun, report)
        if report.has_living_ranks:
            order["notice"] = self._select_notice(job, report)
        run = find_startable_run(begun, report)
        if run is not None and report.generation < run.generation == report.prepared and run.master is not None:
            if not run.in_pods:
                claim_logs(self.service, run)
            order["begin"] = {"host": run.master.host, "port": run.master.port}
        elif max(report.generation, report.prepared) < order["generation"] and not _has_ended(begun, order):
            document = build_run_document(
                job,
                self.snapshot,
                report.node,
                secret=self.service.token_secret,
                archive_bytes_max=self.service.settings.archive_bytes_max,
            )
            order["document"] = document.to_document()
        return order

    def _is_recorded(self, job: Job | None, begun: Iterable[BegunRun], report: AgentReport) -> bool:
        """Return whether the end of the reported run is recorded, or no longer matters."""
        if report.generation == 0 or report.has_living_ranks:
            return False
        if job is None or not _awaits_reports(job):
            return True
        run = _find_run(begun, report.generation)
        if run is None:
            # Another process of the API may have handed it out after this one has read the list.
            run = _find_run(self.service.run_log.list_begun_runs_of(job.id), report.generation)
        return run is None or run.end is not None

    def _select_notice(self, job: Job, report: AgentReport) -> NoticeView | None:
        leaving = select_notice(job, report.generation, self.now_s, self.service.agent_state)
        return leaving or checkpoint_notice(job, report)


def _has_ended(begun: Iterable[BegunRun], order: RunOrderView) -> bool:
    """Return whether the wanted generation has ended already: the snapshot shows it until the next tick.

    One that had begun before the database was backed up is never prepared again.
    """
    return any(run.generation == order["generation"] and (run.end is not None or run.is_restored) for run in begun)


def _find_run(begun: Iterable[BegunRun], generation: int) -> BegunRun | None:
    return next((run for run in begun if run.generation == generation), None)


def _awaits_reports(job: Job) -> bool:
    """Return whether reports on the job matter. Those on a cancelled one show when its GPUs are free."""
    return not job.is_ended or bool(job.allocation.held_gpus)


def _get_owner_name(job: Job) -> str:
    """Return the name by which a machine chooses the user of the ranks if it has none for the owner's id.

    Only admins name tokens and service accounts. The name of an OIDC subject may be chosen by its bearer, so it must
    not select a user that an operator set up for another caller.
    """
    return job.owner_id if job.owner_id.startswith(OIDC_PREFIX) else job.owner


def build_run_document(
    job: Job, snapshot: Snapshot, node: str, *, secret: bytes, archive_bytes_max: int | None = None
) -> RunDocument:
    """Return the job's current generation on `node`. The agent fills in the URL under which it reaches the API."""
    spec, allocation = job.spec, job.allocation
    slots = assign_rank_slots(snapshot.rank_placement(allocation))
    nodes = list(dict.fromkeys(slot.node for slot in slots))
    checkpoint = spec.checkpoint
    return RunDocument(
        job_id=job.id,
        owner=_get_owner_name(job),
        owner_id=job.owner_key,
        node=node,
        generation=allocation.generation,
        command=spec.command,
        nodes=len(nodes),
        node_rank=nodes.index(node),
        world_size=len(slots),
        ranks=tuple(RankSeat(slot.rank, slot.local_rank, slot.gpu) for slot in slots if slot.node == node),
        launch=spec.program.launch,
        has_devices=node not in snapshot.nodes or snapshot.nodes[node].gpu != PROCESSOR_SLOTS,
        archive=spec.program.archive,
        archive_bytes_max=archive_bytes_max,
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
        checkpoint_path=checkpoint.path,
        checkpoint_signal=checkpoint.signal,
        token=issue_worker_token(secret, job.id, allocation.generation),
        hang_timeout_s=spec.hang_timeout_s,
        limits=spec.limit_node(sum(slot.node == node for slot in slots)),
        secrets=spec.program.secrets,
        framework=spec.framework,
    )


def read_reports(document: RunsReportDocument, agent: str, now_s: float, *, address: str) -> tuple[AgentReport, ...]:
    """Return what an agent reports about each job and node. `address` is where other nodes reach its nodes."""
    return tuple(_to_agent_report(run, agent, now_s, address=address) for run in document.runs)


def _to_agent_report(run: RunReportDocument, agent: str, now_s: float, *, address: str) -> AgentReport:
    return AgentReport(
        job_id=run.job_id,
        node=run.node,
        pod=agent,
        at_s=now_s,
        generation=run.generation,
        ranks=tuple(to_rank_report(number, rank) for number, rank in enumerate(run.ranks)),
        failure=run.failure,
        permanent_fault=run.permanent_fault,
        killed=run.killed,
        machine_fault=run.machine_fault,
        terminated=run.terminated,
        checkpoint_at_s=None if run.checkpoint_age_s is None else now_s - run.checkpoint_age_s,
        saved=run.saved,
        exceeded_memory=run.exceeded_memory,
        since_s=now_s,
        prepared=run.prepared,
        setting_up=run.setting_up,
        master_port=run.master_port,
        address=address,
    )
