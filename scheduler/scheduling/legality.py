"""legal: the laws that no decision may break (`illegal`), and the promises that the world may (`breaches`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    LendNode,
    NodeDecision,
    PreemptJob,
    RecallNode,
    RejectJob,
    ResizeJob,
    ReturnNode,
    StartJob,
    StopJob,
    SuspendRun,
    decision_subject,
)
from scheduler.domain.fleet import LoanState, Node, NodeState, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_state import JOB_TRANSITIONS, JobState
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
    """The first law that `decision` breaks in the state that the decisions before it have made, or None."""
    laws = _check_node(snapshot, decision) if isinstance(decision, NodeDecision) else _check_job(snapshot, decision)
    for law, detail in laws:
        return Violation(law, decision_subject(decision), detail)
    if not decision.reason.detail:
        return Violation(Invariant.NO_REASON, decision_subject(decision), "a decision has to say why")
    return None


def _check_job(snapshot: MutableSnapshot, decision: Decision) -> Iterator[tuple[Invariant, str]]:
    assert not isinstance(decision, NodeDecision)
    job = snapshot.jobs.get(decision.job_id)
    if job is None:
        yield Invariant.UNKNOWN_SUBJECT, f"there is no job {decision.job_id}"
        return
    state = _NEXT_STATE[type(decision)]
    if (job.state, state) not in JOB_TRANSITIONS:
        yield Invariant.WRONG_STATE, f"no step leads from {job.state} to {state}"
        return
    if not isinstance(decision, StartJob | RejectJob) and decision.leave_by_s < snapshot.now_s:
        yield Invariant.DEADLINE_PASSED, f"leave_by_s {decision.leave_by_s} is before now, {snapshot.now_s}"
    if isinstance(decision, StartJob | ResizeJob):
        yield from _check_target(snapshot, job, decision)


def _check_target(
    snapshot: MutableSnapshot, job: Job, decision: StartJob | ResizeJob
) -> Iterator[tuple[Invariant, str]]:
    count = gpu_sets.count(decision.gpus)
    spec = job.spec
    if not spec.min_gpus <= count <= spec.max_gpus:
        yield Invariant.OUT_OF_RANGE, f"{count} GPUs are outside {spec.min_gpus} to {spec.max_gpus}"
    if decision.plan.world_size != count:
        yield Invariant.PLAN_SIZE_MISMATCH, f"the plan is for {decision.plan.world_size} GPUs, the target has {count}"
    for name, indices in decision.gpus.items():
        node = snapshot.original.nodes.get(name)
        if node is None or not all(0 <= index < node.gpus for index in indices) or not indices:
            yield Invariant.GPU_UNKNOWN, f"{name} has no GPUs {indices}"
            return
        if len(set(indices)) != len(indices):
            yield Invariant.GPU_HELD_TWICE, f"{name} {indices} names a GPU twice"
        if spec.gpu and node.gpu != spec.gpu:
            yield Invariant.WRONG_GPU_MODEL, f"{name} has {node.gpu}, the job asks for {spec.gpu}"
        yield from _check_memory(job, decision, node)
        yield from _check_occupancy(snapshot, job, name, indices)
    yield from _check_gpu_models(snapshot, decision)
    more = count - job.allocation.target_gpus
    if more > 0 and (why := snapshot.quota.check_limits(job, more)):
        yield Invariant.QUEUE_LIMIT_EXCEEDED, why.detail
    given = decision.seats if isinstance(decision, ResizeJob) else ()
    if given and sorted(given) != sorted(gpu_sets.place_ranks(decision.gpus, first=())):
        yield Invariant.RANK_PLACEMENT_MISMATCH, f"the seats are not the {count} GPUs of the target, each once"


def _check_memory(job: Job, decision: StartJob | ResizeJob, node: Node) -> Iterator[tuple[Invariant, str]]:
    """A plan fits by its predicted peak, corrected by what the job has died of so far."""
    peak_bytes = decision.plan.peak_bytes_per_gpu
    if not job.memory.fits(peak_bytes, node.gpu_memory_bytes):
        times = f"{job.memory.factor:g} times {peak_bytes}" if job.memory.percent > 100 else str(peak_bytes)
        yield Invariant.PEAK_MEMORY_EXCEEDED, f"the plan needs {times} of {node.gpu_memory_bytes} bytes on {node.name}"


def _check_gpu_models(snapshot: MutableSnapshot, decision: StartJob | ResizeJob) -> Iterator[tuple[Invariant, str]]:
    """A plan over two GPU models is for exactly so many GPUs of each."""
    planned, held = dict[str, int](), dict[str, int]()
    for stage in decision.plan.stages[: decision.plan.pipeline_devices]:
        planned[stage.gpu] = planned.get(stage.gpu, 0) + stage.gpus
    for name, indices in decision.gpus.items():
        gpu = snapshot.original.nodes[name].gpu
        held[gpu] = held.get(gpu, 0) + len(indices)
    if planned != held:
        yield (
            Invariant.PLAN_SIZE_MISMATCH,
            f"the plan is for {_format_counts(planned)}, the target has {_format_counts(held)}",
        )


def _format_counts(gpus: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {gpu}" for gpu, count in sorted(gpus.items())) or "no GPUs"


def _check_occupancy(
    snapshot: MutableSnapshot, job: Job, name: str, indices: tuple[int, ...]
) -> Iterator[tuple[Invariant, str]]:
    present = job.allocation.target.get(name, ())
    for index in indices:
        holder = snapshot.holder(name, index)
        if holder is not None and not (holder == job.id and index in present):
            yield Invariant.GPU_HELD_TWICE, f"GPU {index} of {name} is held by {holder}"
    new = [index for index in indices if index not in present]
    node, view = snapshot.original.nodes[name], snapshot.view()
    if new and not view.serves_training(node):
        yield Invariant.NODE_NOT_SERVING, f"{name} takes nothing new"
    if not new and node.state is not NodeState.UP:
        yield Invariant.NODE_NOT_SERVING, f"{name} is down"


def _check_node(snapshot: MutableSnapshot, decision: Decision) -> Iterator[tuple[Invariant, str]]:
    assert isinstance(decision, NodeDecision)
    node = snapshot.original.nodes.get(decision.node)
    if node is None:
        yield Invariant.UNKNOWN_SUBJECT, f"there is no node {decision.node}"
        return
    loan = snapshot.loans.get(node.name)
    state = loan.state if loan and loan.is_live else None
    match decision:
        case LendNode():
            if state is not None or snapshot.original.pools[node.pool].kind is not PoolKind.INFERENCE:
                yield Invariant.WRONG_STATE, f"{node.name} is lent already, or not an inference node"
            if node.state is not NodeState.UP or node.cordoned:
                yield Invariant.NODE_NOT_SERVING, f"{node.name} is down or cordoned"
        case RecallNode(return_by_s=return_by_s):
            if state is not LoanState.ACTIVE:
                yield Invariant.WRONG_STATE, f"{node.name} is not on an active loan"
            if return_by_s < snapshot.now_s:
                yield Invariant.DEADLINE_PASSED, f"return_by_s {return_by_s} is before now, {snapshot.now_s}"
        case CancelRecall():
            if state is not LoanState.RECALLED:
                yield Invariant.WRONG_STATE, f"{node.name} is not recalled"
        case ReturnNode():
            if state not in (LoanState.RECALLED, LoanState.OFFERED):
                yield Invariant.WRONG_STATE, f"{node.name} is not on its way home"
            if users := snapshot.jobs_on_node(node.name):
                yield Invariant.NODE_STILL_USED, f"{node.name} is still held by {', '.join(sorted(users))}"


def find_breaches(snapshot: Snapshot, observation: Observation) -> tuple[Breach, ...]:
    """Promises that the world does not keep just now."""
    strangers = _find_unexpected_runs(snapshot, observation)
    return (
        *_find_late_recalls(snapshot),
        *_find_down_nodes(snapshot),
        *_find_inference_shortages(snapshot),
        *_find_unlent_use(snapshot, observation, strangers),
        *_find_double_use(observation, strangers),
    )


def _find_late_recalls(snapshot: Snapshot) -> Iterator[Breach]:
    for name in sorted(snapshot.index.recalled):
        due_s = snapshot.loans[name].return_by_s
        if due_s is not None and snapshot.now_s > due_s:
            yield Breach(BreachKind.RECALL_LATE, name, f"{name} is {snapshot.now_s - due_s:.1f} s late")


def _find_down_nodes(snapshot: Snapshot) -> Iterator[Breach]:
    for name in sorted(snapshot.index.down):
        yield Breach(BreachKind.NODE_DOWN, name, f"{name} is down")


def _find_inference_shortages(snapshot: Snapshot) -> Iterator[Breach]:
    for pool, gpus in snapshot.index.lent_gpus.items():
        if not gpus:
            continue
        reading = snapshot.demand.get(pool)
        if reading is not None and reading.gpus > (left := snapshot.index.inference_capacity.get(pool, 0)):
            detail = f"{pool} needs {reading.gpus:.1f} GPUs and has {left} beside its loans"
            yield Breach(BreachKind.INFERENCE_SHORT, pool, detail)


def _find_unexpected_runs(snapshot: Snapshot, observation: Observation) -> list[Run]:
    """Runs that are not plainly where the desired state has them. The others hold their GPUs alone by law, so only
    these can be where they must not be."""
    jobs, heard = snapshot.jobs, snapshot.index.observed_runs
    return [
        run
        for run in [run for run in observation.runs if heard.get(run.job_id) is not run]
        if run.gpus and ((job := jobs.get(run.job_id)) is None or job.allocation.target is not run.gpus)
    ]


def _find_unlent_use(snapshot: Snapshot, observation: Observation, unexpected: Iterable[Run]) -> Iterator[Breach]:
    for run in observation.runs if snapshot.index.held_without_loan else unexpected:
        for name in run.gpus:
            node = snapshot.nodes.get(name)
            if node is None or snapshot.pools[node.pool].kind is PoolKind.TRAINING or snapshot.is_lent(node):
                continue
            yield Breach(BreachKind.ON_UNLENT_NODE, name, f"{run.job_id} runs on {name}, which is not lent")


def _find_double_use(observation: Observation, unexpected: Iterable[Run]) -> Iterator[Breach]:
    """Nothing can be used twice but on a node where a stranger is."""
    visited = {name for run in unexpected for name in run.gpus}
    users: dict[tuple[str, int], tuple[str, int]] = {}
    for run in observation.runs if visited else ():
        owner = (run.job_id, run.generation)
        held = [(node, index) for node, indices in run.gpus.items() if node in visited for index in indices]
        for node, index in held:
            other = users.setdefault((node, index), owner)
            if other != owner:
                one, two = (f"{job_id} generation {generation}" for job_id, generation in (other, owner))
                yield Breach(BreachKind.GPU_HELD_TWICE, node, f"GPU {index} of {node} runs {one} and {two}")
