"""The rules that every decision must obey, and the promises that can be broken at run time.

The checker knows nothing of the planner: it judges each decision by the state that the earlier decisions made. The tick
calls it once for each decision and drops those that break a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    LendNode,
    NodeDecision,
    PreemptJob,
    ProposeLoan,
    RecallNode,
    RejectJob,
    ResizeJob,
    ReturnNode,
    StartJob,
    StopJob,
    SuspendRun,
    decision_subject,
)
from scheduler.domain.fleet import Loan, LoanState, Node, NodeState, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_state import JOB_TRANSITIONS, JobState
from scheduler.domain.node_fit import NodeFit
from scheduler.domain.observation import Observation, Run
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, BreachKind, Invariant, Violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot

_NEXT_STATE: dict[type, JobState] = {
    StartJob: JobState.STARTING,
    ResizeJob: JobState.RESIZING,
    PreemptJob: JobState.PREEMPTED,
    SuspendRun: JobState.SUSPENDED,
    StopJob: JobState.CANCELLED,
    RejectJob: JobState.FAILED,
}


def find_violation(snapshot: MutableSnapshot, decision: Decision) -> Violation | None:
    """Return the first rule that `decision` breaks in the state that the earlier decisions made, or None."""
    broken = _check_node(snapshot, decision) if isinstance(decision, NodeDecision) else _check_job(snapshot, decision)
    for invariant, detail in broken:
        return Violation(invariant, decision_subject(decision), detail)
    if not decision.reason.detail:
        return Violation(Invariant.NO_REASON, decision_subject(decision), "the decision has no reason")
    return None


def _check_job(snapshot: MutableSnapshot, decision: Decision) -> Iterator[tuple[Invariant, str]]:
    assert not isinstance(decision, NodeDecision)
    job = snapshot.jobs.get(decision.job_id)
    if job is None:
        yield Invariant.UNKNOWN_SUBJECT, f"job {decision.job_id} does not exist"
        return
    state = _NEXT_STATE[type(decision)]
    if (job.state, state) not in JOB_TRANSITIONS:
        yield Invariant.WRONG_STATE, f"a job cannot go from {job.state} to {state}"
        return
    if not isinstance(decision, StartJob | RejectJob) and decision.leave_by_s < snapshot.now_s:
        yield Invariant.DEADLINE_PASSED, f"leave_by_s {decision.leave_by_s} is earlier than now, {snapshot.now_s}"
    if isinstance(decision, ResizeJob) and not job.is_resizable and not _must_move(snapshot, job):
        yield Invariant.NOT_RESIZABLE, "the job cannot go on after a resize, and leaves no node that it must vacate"
    if isinstance(decision, StartJob | ResizeJob):
        yield from _check_target(snapshot, job, decision)


def _must_move(snapshot: MutableSnapshot, job: Job) -> bool:
    return not snapshot.index.must_vacate.isdisjoint(job.allocation.target)


def _check_target(
    snapshot: MutableSnapshot, job: Job, decision: StartJob | ResizeJob
) -> Iterator[tuple[Invariant, str]]:
    count = gpu_sets.count(decision.gpus)
    spec = job.spec
    if not spec.min_gpus <= count <= spec.max_gpus:
        yield Invariant.OUT_OF_RANGE, f"{count} GPUs; the job accepts {spec.min_gpus} to {spec.max_gpus}"
    if decision.plan.world_size != count:
        yield Invariant.PLAN_SIZE_MISMATCH, f"the plan is for {decision.plan.world_size} GPUs, the target has {count}"
    for name, indices in decision.gpus.items():
        node = snapshot.original.nodes.get(name)
        if node is None or not all(0 <= index < node.gpus for index in indices) or not indices:
            yield Invariant.GPU_UNKNOWN, f"node {name} has no GPUs {indices}"
            return
        if len(set(indices)) != len(indices):
            yield Invariant.GPU_HELD_TWICE, f"GPU indices {indices} of {name} contain a duplicate"
        if spec.gpu and node.gpu != spec.gpu:
            yield Invariant.WRONG_GPU_MODEL, f"node {name} has {node.gpu} GPUs; the job requires {spec.gpu}"
        yield from _check_memory(snapshot, job, decision, node)
        yield from _check_occupancy(snapshot, job, name, indices)
        if len(indices) > len(job.allocation.target.get(name, ())):
            fit = NodeFit(snapshot.index, snapshot.now_s)
            if misfit := fit.find_misfit(job, node, len(indices)):
                yield Invariant.NODE_DOES_NOT_FIT, misfit
    if len(decision.gpus) > 1 and NodeFit(snapshot.index, snapshot.now_s).needs_one_node(job):
        nodes = ", ".join(sorted(decision.gpus))
        yield Invariant.NODE_DOES_NOT_FIT, f"one node at a time can mount its volumes; the target is on {nodes}"
    yield from _check_gpu_models(snapshot, decision)
    more = count - job.allocation.target_gpus
    if more > 0 and (reason := snapshot.quota.check_limits(job, more)):
        yield Invariant.QUEUE_LIMIT_EXCEEDED, reason.detail
    placement = decision.seats if isinstance(decision, ResizeJob) else ()
    if placement and sorted(placement) != sorted(gpu_sets.place_ranks(decision.gpus, first=())):
        yield (
            Invariant.RANK_PLACEMENT_MISMATCH,
            f"the rank placement does not list each of the {count} target GPUs once",
        )


def _check_memory(
    snapshot: MutableSnapshot, job: Job, decision: StartJob | ResizeJob, node: Node
) -> Iterator[tuple[Invariant, str]]:
    """Check the plan's predicted peak, corrected by the job's out-of-memory failures so far.

    Standby replicas of inference keep a part of the memory.
    """
    peak_bytes = decision.plan.peak_bytes_on(node.gpu)
    standby = snapshot.original.pools[node.pool].lending.standby
    kept_bytes = 0 if standby is None else standby.count_kept_bytes(decision.gpus[node.name])
    usable_bytes = node.gpu_memory_bytes - kept_bytes
    if not job.memory.fits(peak_bytes, usable_bytes):
        needed = f"{job.memory.factor:g} times {peak_bytes}" if job.memory.percent > 100 else str(peak_bytes)
        detail = f"the plan needs {needed} bytes; a GPU of {node.name} has {usable_bytes}"
        yield Invariant.PEAK_MEMORY_EXCEEDED, detail


def _check_gpu_models(snapshot: MutableSnapshot, decision: StartJob | ResizeJob) -> Iterator[tuple[Invariant, str]]:
    """Check that the target has as many GPUs of each model as the plan uses."""
    planned, held = dict[str, int](), dict[str, int]()
    for stage in decision.plan.stages[: decision.plan.pipeline_devices]:
        planned[stage.gpu] = planned.get(stage.gpu, 0) + stage.gpus
    for name, indices in decision.gpus.items():
        gpu = snapshot.original.nodes[name].gpu
        held[gpu] = held.get(gpu, 0) + len(indices)
    if planned != held:
        detail = f"the plan is for {_format_counts(planned)}, the target has {_format_counts(held)}"
        yield Invariant.PLAN_SIZE_MISMATCH, detail


def _format_counts(gpus: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {gpu}" for gpu, count in sorted(gpus.items())) or "no GPUs"


def _check_occupancy(
    snapshot: MutableSnapshot, job: Job, name: str, indices: tuple[int, ...]
) -> Iterator[tuple[Invariant, str]]:
    current = job.allocation.target.get(name, ())
    for index in indices:
        holder = snapshot.holder(name, index)
        if holder is not None and not (holder == job.id and index in current):
            yield Invariant.GPU_HELD_TWICE, f"GPU {index} of {name} is held by {holder}"
    new = [index for index in indices if index not in current]
    node, view = snapshot.original.nodes[name], snapshot.view()
    if new and not view.serves_training(node):
        yield Invariant.NODE_NOT_SERVING, f"node {name} does not accept new workers"
    if view.is_partly_lent(node):
        lent = snapshot.loans[name].indices
        if serving := [index for index in indices if index not in lent]:
            yield Invariant.GPU_NOT_LENT, f"inference serves from GPUs {serving} of {name}; GPUs {list(lent)} are lent"
    if new and view.is_lent(node) and not job.accepts_lent_nodes:
        yield Invariant.LENT_NODE_BARRED, f"node {name} is lent, and the job runs on owned nodes only"
    if not new and node.state is not NodeState.UP:
        yield Invariant.NODE_NOT_SERVING, f"node {name} is down"


def _check_node(snapshot: MutableSnapshot, decision: Decision) -> Iterator[tuple[Invariant, str]]:
    assert isinstance(decision, NodeDecision)
    node = snapshot.original.nodes.get(decision.node)
    if node is None:
        yield Invariant.UNKNOWN_SUBJECT, f"node {decision.node} does not exist"
        return
    loan = snapshot.loans.get(node.name)
    state = loan.state if loan and loan.is_live else None
    match decision:
        case ProposeLoan() | LendNode():
            yield from _check_new_loan(snapshot, decision, node, loan)
        case RecallNode(return_by_s=return_by_s):
            if state is not LoanState.ACTIVE:
                yield Invariant.WRONG_STATE, f"node {node.name} has no active loan"
            if return_by_s < snapshot.now_s:
                yield Invariant.DEADLINE_PASSED, f"return_by_s {return_by_s} is earlier than now, {snapshot.now_s}"
        case CancelRecall():
            if state is not LoanState.RECALLED:
                yield Invariant.WRONG_STATE, f"node {node.name} is not recalled"
        case ReturnNode():
            if state not in (LoanState.RECALLED, LoanState.OFFERED, LoanState.PROPOSED):
                yield Invariant.WRONG_STATE, f"the loan of node {node.name} is neither proposed, offered nor recalled"
            if users := snapshot.jobs_on_node(node.name):
                yield Invariant.NODE_STILL_USED, f"node {node.name} is still held by {', '.join(sorted(users))}"


def _check_new_loan(
    snapshot: MutableSnapshot, decision: ProposeLoan | LendNode, node: Node, loan: Loan | None
) -> Iterator[tuple[Invariant, str]]:
    pool, now_s = snapshot.original.pools[node.pool], snapshot.now_s
    proposed = loan if loan is not None and loan.state is LoanState.PROPOSED else None
    is_lent = loan is not None and loan.is_live and (proposed is None or isinstance(decision, ProposeLoan))
    if is_lent or pool.kind is not PoolKind.INFERENCE:
        yield Invariant.WRONG_STATE, f"node {node.name} is already lent, or not in an inference pool"
    if pool.lending.is_shadow:
        yield Invariant.POOL_IN_SHADOW, f"pool {pool.name} is in shadow mode, which lends nothing"
    if node.state is not NodeState.UP or node.cordoned:
        yield Invariant.NODE_NOT_SERVING, f"node {node.name} is down or cordoned"
    if not node.lendable:
        yield Invariant.WRONG_STATE, f"node {node.name} is not lendable"
    if obstacle := node.find_standby_obstacle(now_s):
        yield Invariant.WRONG_STATE, f"node {node.name} has no replica that can sleep: {obstacle}"
    if now_s < node.vetoed_until_s:
        yield Invariant.LOAN_VETOED, f"a veto protects node {node.name} for {node.vetoed_until_s - now_s:.0f} s"
    if isinstance(decision, ProposeLoan):
        if decision.offer_at_s < now_s:
            yield Invariant.DEADLINE_PASSED, f"offer_at_s {decision.offer_at_s} is earlier than now, {now_s}"
    elif pool.lending.notice_s > 0 if proposed is None else proposed.offered_at_s > now_s:
        yield Invariant.NOTICE_RUNNING, f"the notice for node {node.name} has not ended"


def find_breaches(snapshot: Snapshot, observation: Observation) -> tuple[Breach, ...]:
    """Return the promises that are broken now."""
    unexpected = _find_unexpected_runs(snapshot, observation)
    return (
        *_find_late_recalls(snapshot),
        *_find_down_nodes(snapshot),
        *_find_inference_shortages(snapshot),
        *_find_unlent_use(snapshot, observation, unexpected),
        *_find_double_use(observation, unexpected),
        *_find_failed_wakes(snapshot),
    )


def _find_late_recalls(snapshot: Snapshot) -> Iterator[Breach]:
    for name in sorted(snapshot.index.recalled):
        due_s = snapshot.loans[name].return_by_s
        if due_s is not None and snapshot.now_s > due_s:
            yield Breach(
                BreachKind.RECALL_LATE, name, f"node {name} is {snapshot.now_s - due_s:.1f} s past its return deadline"
            )


def _find_down_nodes(snapshot: Snapshot) -> Iterator[Breach]:
    for name in sorted(snapshot.index.down):
        yield Breach(BreachKind.NODE_DOWN, name, f"node {name} is down")


def _find_failed_wakes(snapshot: Snapshot) -> Iterator[Breach]:
    for name in sorted(snapshot.index.wake_failed):
        standby = snapshot.nodes[name].standby
        assert standby is not None, "the index names nodes with standby replicas"
        detail = f"an inference replica on node {name} does not serve again: {standby.detail}"
        yield Breach(BreachKind.REPLICA_NOT_AWAKE, name, detail)


def _find_inference_shortages(snapshot: Snapshot) -> Iterator[Breach]:
    for pool, gpus in snapshot.index.lent_gpus.items():
        if not gpus:
            continue
        reading = snapshot.demand.get(pool)
        if reading is not None and reading.gpus > (left := snapshot.index.inference_capacity.get(pool, 0)):
            detail = f"pool {pool} needs {reading.gpus:.1f} GPUs; {left} are left beside its loans"
            yield Breach(BreachKind.INFERENCE_SHORT, pool, detail)


def _find_unexpected_runs(snapshot: Snapshot, observation: Observation) -> list[Run]:
    """Return runs that hold GPUs and are not exactly where the desired state has them.

    Legal targets do not overlap, so every run that is where it must not be is among these.
    """
    jobs, unexpected = snapshot.jobs, list[Run]()
    for run in observation.runs:
        if not run.gpus:
            continue
        job = jobs.get(run.job_id)
        if job is None or job.allocation.generation != run.generation or job.allocation.target != run.gpus:
            unexpected.append(run)
    return unexpected


def _find_unlent_use(snapshot: Snapshot, observation: Observation, unexpected: Iterable[Run]) -> Iterator[Breach]:
    for run in observation.runs if snapshot.index.held_without_loan else unexpected:
        for name, indices in run.gpus.items():
            node = snapshot.nodes.get(name)
            if node is None or snapshot.pools[node.pool].kind is PoolKind.TRAINING:
                continue
            loan = snapshot.loans.get(name)
            if loan is None or not loan.is_lent:
                yield Breach(BreachKind.ON_UNLENT_NODE, name, f"job {run.job_id} runs on {name}, which is not lent")
            elif loan.is_partial and (foreign := [index for index in indices if index not in loan.indices]):
                detail = f"job {run.job_id} runs on GPUs {foreign} of {name}, which are not on loan"
                yield Breach(BreachKind.ON_UNLENT_NODE, name, detail)


def _find_double_use(observation: Observation, unexpected: Iterable[Run]) -> Iterator[Breach]:
    """Compare all runs on the nodes of unexpected runs. Expected runs alone cannot overlap."""
    visited = {name for run in unexpected for name in run.gpus}
    users: dict[tuple[str, int], tuple[str, int]] = {}
    for run in observation.runs if visited else ():
        owner = (run.job_id, run.generation)
        used = [(node, index) for node, indices in run.gpus.items() if node in visited for index in indices]
        for node, index in used:
            other = users.setdefault((node, index), owner)
            if other != owner:
                one, two = (f"job {job_id}, generation {generation}" for job_id, generation in (other, owner))
                yield Breach(BreachKind.GPU_HELD_TWICE, node, f"GPU {index} of {node} is used by {one} and by {two}")
