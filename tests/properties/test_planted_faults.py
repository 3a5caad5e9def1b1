"""Faults planted in the core, one at a time: each must be caught by the checker, the breaches or a law of state.

A check that cannot fail is worth nothing; this file shows that ours do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from scheduler.scheduling import cycle as course_module
from scheduler.scheduling import observation as mirror_module
from scheduler.scheduling import scheduler as decide_module
from scheduler.scheduling import snapshot_update as absorb_module
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.desired_state import apply_decision
from scheduler.scheduling.legality import find_breaches, find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot, SnapshotBuilder
from scheduler.scheduling.policies.policy_set import PolicySet, load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from tests.properties.worlds import World, a_world

MOST_WORLDS = 600
Plant = Callable[[pytest.MonkeyPatch], PolicySet]


def caught(world: World, policies: PolicySet) -> set[str]:
    """The names of everything that speaks up when one tick's core runs on a world."""
    absorbed = update_snapshot(world.snapshot, world.observation, ()).snapshot
    found = set(_laws_of_state(world, absorbed))
    draft = MutableSnapshot(absorbed)
    for decision in decide(absorbed, policies).decisions:
        violation = find_violation(draft, decision)
        if violation is not None:
            found.add(str(violation.law))
        else:
            apply_decision(draft, decision)
    return found | {str(breach.kind) for breach in find_breaches(draft.view(), world.observation)}


def _laws_of_state(world: World, absorbed: Snapshot) -> Iterator[str]:
    for run in world.observation.runs:
        held = absorbed.jobs[run.job_id].allocation.held
        if any(not set(indices) <= set(held.get(name, ())) for name, indices in run.gpus.items()):
            yield "freed-while-in-use"
    for job_id, job in absorbed.jobs.items():
        before = world.snapshot.jobs[job_id].allocation
        is_stale = world.observation.converged_generation < before.asked_at_generation
        if is_stale and job.allocation.held_gpus < before.held_gpus:
            yield "freed-on-a-stale-observation"


def forget_releasing(patch: pytest.MonkeyPatch) -> PolicySet:
    """GPUs are handed out before they are seen free."""

    class Forgetful(MutableSnapshot):
        def __init__(self, snapshot: Snapshot) -> None:
            jobs = {
                id_: replace(job, allocation=replace(job.allocation, releasing={}))
                for id_, job in snapshot.jobs.items()
            }
            super().__init__(replace(snapshot, jobs=jobs))

    patch.setattr(course_module, "Draft", Forgetful)
    return load_policy_set("ebbtide")


def place_on_recalled_nodes(patch: pytest.MonkeyPatch) -> PolicySet:
    """Placement takes free GPUs of nodes that are on their way home."""

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

    def plan_on(self: SchedulingCycle, job: Job, shape: GpuShape, *, asks: bool = True) -> ParallelPlan | None:
        plan = honest(self, job, shape)
        return spoil(plan) if plan else None

    patch.setattr(SchedulingCycle, "plan_on", plan_on)
    return load_policy_set("ebbtide")


def attach_a_plan_of_another_size(patch: pytest.MonkeyPatch) -> PolicySet:
    """The plan has one stage more than there are GPUs for."""
    return _with_plans(patch, lambda plan: replace(plan, stages=plan.stages * 2))


def ignore_gpu_memory(patch: pytest.MonkeyPatch) -> PolicySet:
    """The plan needs more memory than the GPU has."""
    return _with_plans(patch, lambda plan: replace(plan, peak_bytes_per_gpu=10**12))


def start_below_the_minimum(patch: pytest.MonkeyPatch) -> PolicySet:
    """Placement hands out one GPU too few."""

    def place(snapshot: Snapshot, rooms: Iterable[FreeGpus], job: Job, count: int) -> Gpus | None:
        return load_policy_set("ebbtide").place(snapshot, rooms, job, max(1, count - 1))

    return replace(load_policy_set("ebbtide"), place=place)


def return_nodes_in_use(patch: pytest.MonkeyPatch) -> PolicySet:
    """A recalled node is declared home while jobs still hold GPUs of it."""

    def return_nodes(course: SchedulingCycle) -> None:
        for loan in list(course.snapshot.loans.values()):
            if loan.state is LoanState.RECALLED:
                course.apply(ReturnNode(loan.node, Reason(ReasonCode.TRAINING_LEFT, "training has left, surely")))

    patch.setattr(decide_module, "return_empty_nodes", return_nodes)
    return load_policy_set("ebbtide")


def free_on_any_observation(patch: pytest.MonkeyPatch) -> PolicySet:
    """An observation from before the release counts as proof that the GPUs are free."""
    honest = mirror_module.mirror_runs
    patch.setattr(
        absorb_module, "mirror_runs", lambda intake, seen: honest(intake, replace(seen, converged_generation=10**9))
    )
    return load_policy_set("ebbtide")


def free_without_looking(patch: pytest.MonkeyPatch) -> PolicySet:
    """Releasing GPUs are freed although workers are still seen on them."""

    def free(intake: SnapshotBuilder, job: Job, runs: Iterable[Run]) -> None:
        intake.jobs[job.id] = replace(job, allocation=replace(job.allocation, releasing={}))

    patch.setattr(mirror_module, "_free", free)
    return load_policy_set("ebbtide")


def start_twice(patch: pytest.MonkeyPatch) -> PolicySet:
    """One job is started by two stages of the same tick."""

    def again(course: SchedulingCycle) -> None:
        for decision in [d for d in course.decisions if isinstance(d, StartJob)]:
            course.apply(decision)

    patch.setattr(decide_module, "flex", again)
    return load_policy_set("ebbtide")


def give_no_reason(patch: pytest.MonkeyPatch) -> PolicySet:
    """A stage decides without saying why."""

    def flex(course: SchedulingCycle) -> None:
        course.decisions[:] = [replace(d, reason=replace(d.reason, detail="")) for d in course.decisions]

    patch.setattr(decide_module, "flex", flex)
    return load_policy_set("ebbtide")


def let_two_generations_run(patch: pytest.MonkeyPatch) -> PolicySet:
    """An executor starts the new generation beside the old one."""
    return load_policy_set("ebbtide")


PLANTS: list[tuple[Plant, str]] = [
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


@pytest.mark.parametrize(("plant", "law"), PLANTS, ids=lambda item: getattr(item, "__name__", str(item)))
def test_a_planted_fault_is_caught(plant: Plant, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = plant(monkeypatch)
    for seed in range(MOST_WORLDS):
        world = a_world(seed)
        if plant is let_two_generations_run:
            world = _doubled(world)
        if str(law) in caught(world, policies):
            print(f"\n{plant.__doc__} Caught as {law} in world {seed}.")
            return
    pytest.fail(f"{plant.__name__} went unnoticed in {MOST_WORLDS} worlds")


def test_without_a_plant_nothing_speaks_up() -> None:
    alarms = {str(law) for _, law in PLANTS}
    for seed in range(MOST_WORLDS):
        assert alarms.isdisjoint(caught(a_world(seed), load_policy_set("ebbtide"))), f"world {seed}"


def _doubled(world: World) -> World:
    runs = tuple(run for run in world.observation.runs if run.gpus)
    doubles = tuple(replace(run, generation=run.generation + 1) for run in runs)
    return replace(world, observation=replace(world.observation, runs=(*world.observation.runs, *doubles)))
