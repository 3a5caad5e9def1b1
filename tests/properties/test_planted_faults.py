"""Planted faults: each one must be found by the legality check, the breaches or a check of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from scheduler.domain.decisions import Reason, ReasonCode, ReturnNode, StartJob
from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import FreeGpus, Gpus, GpuShape
from scheduler.domain.job import Job
from scheduler.domain.observation import Run
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import BreachKind, Invariant
from scheduler.scheduling import cycle as cycle_module
from scheduler.scheduling import observation as observation_module
from scheduler.scheduling import scheduler as scheduler_module
from scheduler.scheduling import snapshot_update as update_module
from scheduler.scheduling.cycle import SchedulingCycle, StageReport
from scheduler.scheduling.desired_state import apply_decision
from scheduler.scheduling.legality import find_breaches, find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.policy_sets import PolicySet, load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from scheduler.scheduling.stages.starting import start_pending_jobs
from tests.properties.worlds import World, a_world

WORLDS_MAX = 600
Fault = Callable[[pytest.MonkeyPatch], PolicySet]


def find_alarms(world: World, policies: PolicySet) -> set[str]:
    """Return the names of all checks that fail when a world is updated and decided on once."""
    updated = update_snapshot(world.snapshot, world.observation, ()).snapshot
    found = set(_check_state(world, updated))
    state = MutableSnapshot(updated)
    for decision in decide(updated, policies).decisions:
        violation = find_violation(state, decision)
        if violation is not None:
            found.add(str(violation.invariant))
        else:
            apply_decision(state, decision)
    return found | {str(breach.kind) for breach in find_breaches(state.view(), world.observation)}


def _check_state(world: World, updated: Snapshot) -> Iterator[str]:
    for run in world.observation.runs:
        held = updated.jobs[run.job_id].allocation.held
        if any(not set(indices) <= set(held.get(name, ())) for name, indices in run.gpus.items()):
            yield "freed-while-in-use"
    for job_id, job in updated.jobs.items():
        before = world.snapshot.jobs[job_id].allocation
        is_stale = world.observation.converged_generation < before.asked_at_generation
        if is_stale and job.allocation.held_gpus < before.held_gpus:
            yield "freed-on-a-stale-observation"


def forget_releasing(patch: pytest.MonkeyPatch) -> PolicySet:
    """GPUs are allocated before they are observed to be free."""

    class Forgetful(MutableSnapshot):
        def __init__(self, snapshot: Snapshot) -> None:
            jobs = {
                id_: replace(job, allocation=replace(job.allocation, releasing={}))
                for id_, job in snapshot.jobs.items()
            }
            super().__init__(replace(snapshot, jobs=jobs))

    patch.setattr(cycle_module, "MutableSnapshot", Forgetful)
    return load_policy_set("ebbtide")


def place_on_recalled_nodes(patch: pytest.MonkeyPatch) -> PolicySet:
    """Placement uses free GPUs of recalled nodes."""

    def place(snapshot: Snapshot, rooms: Iterable[FreeGpus], job: Job, count: int) -> Gpus | None:
        held = {name for other in snapshot.jobs.values() for name in other.allocation.held}
        for loan in snapshot.loans.values():
            node = snapshot.nodes[loan.node]
            if loan.state is LoanState.RECALLED and loan.node not in held and node.gpus >= count:
                return {loan.node: tuple(range(count))}
        return load_policy_set("ebbtide").place(snapshot, rooms, job, count)

    return replace(load_policy_set("ebbtide"), place=place)


def _with_plans(patch: pytest.MonkeyPatch, spoil: Callable[[ParallelPlan], ParallelPlan]) -> PolicySet:
    honest = SchedulingCycle.plan_on

    def plan_on(
        self: SchedulingCycle, job: Job, shape: GpuShape, *, request_missing: bool = True
    ) -> ParallelPlan | None:
        plan = honest(self, job, shape)
        return spoil(plan) if plan else None

    patch.setattr(SchedulingCycle, "plan_on", plan_on)
    return load_policy_set("ebbtide")


def attach_a_plan_of_another_size(patch: pytest.MonkeyPatch) -> PolicySet:
    """The plan has twice as many stages as the GPUs hold."""
    return _with_plans(patch, lambda plan: replace(plan, stages=plan.stages * 2))


def ignore_gpu_memory(patch: pytest.MonkeyPatch) -> PolicySet:
    """The plan needs more memory than the GPU has."""
    return _with_plans(patch, lambda plan: replace(plan, peak_bytes_per_gpu=10**12))


def start_below_the_minimum(patch: pytest.MonkeyPatch) -> PolicySet:
    """Placement returns one GPU too few."""

    def place(snapshot: Snapshot, rooms: Iterable[FreeGpus], job: Job, count: int) -> Gpus | None:
        return load_policy_set("ebbtide").place(snapshot, rooms, job, max(1, count - 1))

    return replace(load_policy_set("ebbtide"), place=place)


def return_nodes_in_use(patch: pytest.MonkeyPatch) -> PolicySet:
    """A recalled node is returned while jobs still hold GPUs of it."""

    def return_nodes(cycle: SchedulingCycle) -> StageReport:
        for loan in list(cycle.snapshot.loans.values()):
            if loan.state is LoanState.RECALLED:
                cycle.apply(ReturnNode(loan.node, Reason(ReasonCode.TRAINING_LEFT, "training left")))
        return StageReport()

    patch.setattr(scheduler_module, "adjust_loans", return_nodes)
    return load_policy_set("ebbtide")


def free_on_any_observation(patch: pytest.MonkeyPatch) -> PolicySet:
    """An observation from before the release frees GPUs."""
    honest = observation_module.mirror_runs
    patch.setattr(
        update_module,
        "mirror_runs",
        lambda snapshot, observation: honest(snapshot, replace(observation, converged_generation=10**9)),
    )
    return load_policy_set("ebbtide")


def free_without_looking(patch: pytest.MonkeyPatch) -> PolicySet:
    """Releasing GPUs are freed while workers are still observed on them."""

    def free(snapshot: MutableSnapshot, job: Job, runs: Iterable[Run]) -> None:
        snapshot.put_job(replace(job, allocation=replace(job.allocation, releasing={})))

    patch.setattr(observation_module, "_free_released_gpus", free)
    return load_policy_set("ebbtide")


def start_twice(patch: pytest.MonkeyPatch) -> PolicySet:
    """One job is started by two stages of the same tick."""

    def start_again(cycle: SchedulingCycle, evacuation: StageReport) -> Sequence[StageReport]:
        starting = start_pending_jobs(cycle, evacuation)
        for decision in [d for d in cycle.decisions if isinstance(d, StartJob)]:
            cycle.apply(decision)
        return (starting,)

    return replace(load_policy_set("ebbtide"), assign_gpus=start_again)


def give_no_reason(patch: pytest.MonkeyPatch) -> PolicySet:
    """A stage decides without a reason."""

    def drop_reasons(cycle: SchedulingCycle, evacuation: StageReport) -> Sequence[StageReport]:
        starting = start_pending_jobs(cycle, evacuation)
        cycle.decisions[:] = [replace(d, reason=replace(d.reason, detail="")) for d in cycle.decisions]
        return (starting,)

    return replace(load_policy_set("ebbtide"), assign_gpus=drop_reasons)


def let_two_generations_run(patch: pytest.MonkeyPatch) -> PolicySet:
    """An executor runs the new generation beside the old one."""
    return load_policy_set("ebbtide")


FAULTS: list[tuple[Fault, str]] = [
    (forget_releasing, Invariant.GPU_HELD_TWICE),
    (place_on_recalled_nodes, Invariant.NODE_NOT_SERVING),
    (attach_a_plan_of_another_size, Invariant.PLAN_SIZE_MISMATCH),
    (ignore_gpu_memory, Invariant.PEAK_MEMORY_EXCEEDED),
    (start_below_the_minimum, Invariant.OUT_OF_RANGE),
    (return_nodes_in_use, Invariant.NODE_STILL_USED),
    (free_on_any_observation, "freed-on-a-stale-observation"),
    (free_without_looking, "freed-while-in-use"),
    (start_twice, Invariant.WRONG_STATE),
    (give_no_reason, Invariant.NO_REASON),
    (let_two_generations_run, BreachKind.GPU_HELD_TWICE),
]


@pytest.mark.parametrize(("fault", "alarm"), FAULTS, ids=lambda item: getattr(item, "__name__", str(item)))
def test_planted_fault_is_found(fault: Fault, alarm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = fault(monkeypatch)
    for seed in range(WORLDS_MAX):
        world = a_world(seed)
        if fault is let_two_generations_run:
            world = _with_two_generations(world)
        if str(alarm) in find_alarms(world, policies):
            print(f"\n{fault.__doc__} Found as {alarm} in world {seed}.")
            return
    pytest.fail(f"{fault.__name__} was not found in {WORLDS_MAX} worlds")


def test_no_alarm_without_a_fault() -> None:
    alarms = {str(alarm) for _, alarm in FAULTS}
    for seed in range(WORLDS_MAX):
        assert alarms.isdisjoint(find_alarms(a_world(seed), load_policy_set("ebbtide"))), f"world {seed}"


def _with_two_generations(world: World) -> World:
    runs = tuple(run for run in world.observation.runs if run.gpus)
    doubles = tuple(replace(run, generation=run.generation + 1) for run in runs)
    return replace(world, observation=replace(world.observation, runs=(*world.observation.runs, *doubles)))
