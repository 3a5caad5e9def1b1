"""Stock: the GPUs that waiting jobs may have, free now or soon, by kind.

Backfill: who may pass the first waiting job that does not fit, without delaying it.

EASY backfilling (Lifka, JSSPP'95; Mu'alem and Feitelson, TPDS'01): from when running jobs are expected to end follows
the shadow time, at which that job can start, and how many GPUs are extra then. Whoever comes behind it may start if
it ends before, or on extra GPUs. GPUs that elastic jobs hold above their base are not in its way: they count as free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf

from scheduler.domain.job import Job
from scheduler.domain.snapshot_index import GpuKind
from scheduler.scheduling.cycle import ResourceKind, SchedulingCycle
from scheduler.scheduling.policies.quota import QuotaState
from scheduler.scheduling.policies.speed import min_feasible_gpus, step_time_s
from scheduler.scheduling.target_selection import is_resizable

GpuRequest = tuple[str, bool]
"""The GPU model that a job asks for, "" for any, and whether lent nodes will do."""


class CountsByKind:
    """Counts of GPUs by kind, taken together, and the totals by model that were asked for, most first, worked out once
    for all jobs of one wish. Who changes the counts clears the totals."""

    def __init__(self, *counts: Counter[GpuKind]) -> None:
        self._counts = counts
        self.totals_by_request: dict[GpuRequest, list[tuple[int, str]]] = {}

    def compute_totals(
        self, request: GpuRequest, choices: Iterable[tuple[str, list[GpuKind]]]
    ) -> list[tuple[int, str]]:
        found = [(sum(gpus.get(kind, 0) for gpus in self._counts for kind in kinds), gpu) for gpu, kinds in choices]
        self.totals_by_request[request] = sorted(found, key=lambda item: (-item[0], item[1]))
        return self.totals_by_request[request]


class GpuBudget:
    """What is left while the queue is dealt out in order. Mutable, and gone when `start_waiting` is done.

    Counting by kind matters: a job that waits for one GPU model must not keep another model from those behind it.
    """

    def __init__(self, cycle: SchedulingCycle) -> None:
        self._snapshot = cycle.view
        self._sizes = cycle.node_sizes
        self._kinds_by_request: dict[GpuRequest, list[tuple[str, list[GpuKind]]]] = {}
        self._needs: dict[tuple[str, str], int] = {}
        self._free: Counter[GpuKind] = Counter(cycle.snapshot.ledger.free_gpus)
        self._serving: Counter[GpuKind] = Counter(cycle.snapshot.ledger.training_gpus)
        self._blocked: dict[GpuKind, str] = {}
        self._cycle = cycle
        self._reservation: Reservation | None = None
        self._excludes_reserved_nodes = False
        self._free_counts, self._serving_counts = CountsByKind(self._free), CountsByKind(self._serving)
        self._mutable_counts = [self._free_counts]

    @cached_property
    def _pending(self) -> Counter[GpuKind]:
        """What running jobs are giving up or could give up; nobody asks while everybody finds free GPUs."""
        soon = count_pending_gpus(self._cycle)
        for claim, gpus in self._cycle.pending_moves.values():
            kind = (claim.gpu, not claim.owned_only)
            soon[kind] -= gpus
        return soon

    @cached_property
    def _free_and_pending_counts(self) -> CountsByKind:
        self._mutable_counts.append(pile := CountsByKind(self._free, self._pending))
        return pile

    def free_gpus(self, job: Job) -> int:
        """GPUs that the job may use and that are free now."""
        return sum(gpus for gpus, _ in self._totals_for(job, self._free_counts))

    def unallocated_gpus(self, gpu: str) -> int:
        """Free GPUs of this model that were dealt to nobody and are kept for nobody."""
        return sum(gpus for (model, _), gpus in self._free.items() if model == gpu)

    def needed_gpus(self, job: Job) -> int:
        """GPUs that the job starts on, of the model of which it needs fewest."""
        return min([self._needed_of_model(job, gpu) for gpu, _ in self._kinds_by_model(job)], default=job.spec.min_gpus)

    def blocking_job(self, job: Job) -> str | None:
        """Why a job that is neither offered nor promised GPUs waits: the overdue job that keeps everybody behind it
        off those that this one could use, or the job that this one would delay."""
        if self._blocked:
            closed = next((self._blocked[kind] for kind in self._kinds_for(job) if kind in self._blocked), None)
            if closed is not None:
                return closed
        return (
            self._reservation.job_id
            if self._reservation and self._fitting_models(job, self._free_and_pending_counts)
            else None
        )

    def offer(self, job: Job) -> tuple[str, int] | None:
        """A GPU model and the fewest GPUs of it that the job can start on now; most free GPUs first."""
        return self._first_permitted(job, self._fitting_models(job, self._free_counts))

    def min_feasible_offer(self, job: Job) -> tuple[str, int] | None:
        """As `offer`, with the fewest GPUs that any plan works on, however inefficient it is."""
        for gpu, kinds in self._kinds_by_model(job):
            least = min_feasible_gpus(self._snapshot, job, self._sizes, gpu)
            if least <= sum(self._free[kind] for kind in kinds):
                return gpu, least
        return None

    def pending_offer(self, job: Job) -> tuple[str, int] | None:
        """As `offer`, with the GPUs that running jobs are giving up or could give up."""
        return self._first_permitted(job, self._fitting_models(job, self._free_and_pending_counts))

    def shortage(self, job: Job) -> tuple[str, int, int] | None:
        """The GPU model of which the job lacks least, how many it needs, and how many are neither free nor given up."""
        found: list[tuple[int, str, int]] = []
        for gpu, kinds in self._kinds_by_model(job):
            if sum(self._serving[kind] for kind in kinds) >= (need := self._needed_of_model(job, gpu)):
                found.append((need - self._free_or_pending(kinds), gpu, need))
        missing, gpu, need = min(found, default=(0, "", 0))
        return (gpu, need, missing) if missing > 0 else None

    def could_ever_fit(self, job: Job) -> bool:
        """The job would fit if nobody else were there: waiting makes sense."""
        return bool(self._fitting_models(job, self._serving_counts))

    def begin_job(self, job: Job) -> None:
        """The queue has come to this job: nodes that are kept for those before it are not there any more."""
        if not self._excludes_reserved_nodes and self._cycle.is_excluded(job):
            self._excludes_reserved_nodes = True
            self._invalidate_totals()
            for room in self._cycle.reserved_rooms:
                self._free[room.gpu, room.is_lent] -= len(room.indices)

    @property
    def has_reservation(self) -> bool:
        """Some job before has to wait, and nobody may delay the start that it has in sight."""
        return self._reservation is not None

    def reserve_for(self, job: Job) -> None:
        """From now on nobody is offered GPUs that would delay this job, if it is the first that has to wait."""
        if self._cycle.policies.backfill and self._reservation is None:
            shadows = [
                shadow
                for gpu, kinds in self._kinds_by_model(job)
                if (need := self._needed_of_model(job, gpu)) <= sum(self._serving[kind] for kind in kinds)
                and (shadow := reserve(self._cycle, job, kinds, need, self._free_or_pending(kinds)))
            ]
            self._reservation = min(shadows, key=lambda shadow: shadow.start_at_s, default=None)

    def allocate(self, job: Job, gpu: str, gpus: int) -> None:
        """Deal out `gpus` free GPUs; a job's base goes onto owned nodes first."""
        self._charge_reservation(job, gpu, gpus)
        self._deduct(self._free, job, gpu, gpus)

    def allocate_pending(self, job: Job, gpu: str, gpus: int) -> tuple[ResourceKind, int]:
        """Keep what is free and promise the rest; returns how much has to be given up, and of what kind."""
        self._charge_reservation(job, gpu, gpus)
        missing = gpus - self._deduct(self._free, job, gpu, gpus)
        self._deduct(self._pending, job, gpu, missing)
        return ResourceKind(gpu, owned_only=not job.spec.fungible), missing

    def block_behind(self, job: Job) -> None:
        """Nobody behind this job gets anything that it could use."""
        self._invalidate_totals()
        for kind in self._kinds_for(job):
            self._blocked.setdefault(kind, job.id)
            self._free[kind] = self._pending[kind] = 0

    def _invalidate_totals(self) -> None:
        for pile in self._mutable_counts:
            pile.totals_by_request.clear()

    def _kinds_for(self, job: Job) -> list[GpuKind]:
        return [kind for _, kinds in self._kinds_by_model(job) for kind in kinds]

    def _kinds_by_model(self, job: Job) -> list[tuple[str, list[GpuKind]]]:
        """Each GPU model that the job may use, with its kinds."""
        wish = (job.spec.gpu, job.spec.fungible)
        if wish not in self._kinds_by_request:
            models = [job.spec.gpu] if job.spec.gpu else sorted(self._sizes)
            kinds = (False, True) if job.spec.fungible else (False,)
            self._kinds_by_request[wish] = [(gpu, [(gpu, lent) for lent in kinds]) for gpu in models]
        return self._kinds_by_request[wish]

    def _free_or_pending(self, kinds: Iterable[GpuKind]) -> int:
        return sum(self._free[kind] + self._pending[kind] for kind in kinds)

    def _first_permitted(self, job: Job, fitting: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
        """The first of these GPU models and counts on which the job delays nobody who comes before it."""
        if self._reservation is None:
            return next(iter(fitting), None)
        shadow = self._reservation
        return next((fit for fit in fitting if shadow.permits(*fit, self._estimate_end_s(job, *fit))), None)

    def _charge_reservation(self, job: Job, gpu: str, gpus: int) -> None:
        if self._reservation:
            self._reservation.charge(gpu, gpus, self._estimate_end_s(job, gpu, gpus))

    def _estimate_end_s(self, job: Job, gpu: str, gpus: int) -> float:
        """When the job would end if it started now; infinite where its length or its speed is unknown."""
        steps = job.remaining_steps(self._snapshot.now_s)
        return inf if steps is None else self._snapshot.now_s + steps * self._step_s(job, gpu, gpus)

    def _step_s(self, job: Job, gpu: str, gpus: int) -> float:
        step_s = step_time_s(self._snapshot, job, gpus, self._sizes, gpu)
        return inf if step_s is None else step_s

    def _fitting_models(self, job: Job, counts: CountsByKind) -> list[tuple[str, int]]:
        """The GPU models with enough GPUs on the pile for the job, and how many it needs of each: first the model on
        which its curve is fastest, of equals the one with most GPUs."""
        least = job.spec.min_gpus
        fitting: list[tuple[str, int]] = []
        for total, gpu in self._totals_for(job, counts):
            if total < least:
                break
            if (need := self._needed_of_model(job, gpu)) <= total:
                fitting.append((gpu, need))
        return sorted(fitting, key=lambda fit: self._step_s(job, *fit)) if len(fitting) > 1 else fitting

    def _totals_for(self, job: Job, counts: CountsByKind) -> list[tuple[int, str]]:
        wish = (job.spec.gpu, job.spec.fungible)
        return counts.totals_by_request.get(wish) or counts.compute_totals(wish, self._kinds_by_model(job))

    def _needed_of_model(self, job: Job, gpu: str) -> int:
        if (job.id, gpu) not in self._needs:
            self._needs[job.id, gpu] = self._cycle.policies.starting_gpus(self._snapshot, job, self._sizes, gpu)
        return self._needs[job.id, gpu]

    def _deduct(self, gpus: Counter[GpuKind], job: Job, gpu: str, wanted: int) -> int:
        taken = 0
        self._invalidate_totals()
        for kind in self._kinds_for(job):
            if kind[0] == gpu:
                part = min(gpus[kind], wanted - taken)
                gpus[kind] -= part
                taken += part
        return taken


def count_pending_gpus(cycle: SchedulingCycle) -> Counter[GpuKind]:
    """GPUs that running jobs are giving up or could give up."""
    return count_releasing_gpus(cycle) + _count_flexible_gpus(cycle)


def count_releasing_gpus(cycle: SchedulingCycle) -> Counter[GpuKind]:
    """GPUs that jobs are giving up on nodes that training may go on using: they are free soon."""
    view = cycle.view
    found: Counter[GpuKind] = Counter()
    for job_id in cycle.snapshot.ledger.releasing:
        for name, indices in view.jobs[job_id].allocation.releasing.items():
            node = view.nodes.get(name)
            if node is not None and view.serves_training(node):
                found[node.gpu, view.is_lent(node)] += len(indices)
    return found


def _count_flexible_gpus(cycle: SchedulingCycle) -> Counter[GpuKind]:
    """GPUs that running elastic jobs hold above their minimum and that may be taken now.

    A job with lent GPUs gives those up first, so all its flexible ones count as lent. What its queue holds of its
    guarantee is not counted: no other queue may have that.
    """
    found: Counter[GpuKind] = Counter()
    if cycle.policies.scale is None or cycle.snapshot.original.switches.resizes_frozen:
        return found
    view, sizes, book = cycle.view, cycle.node_sizes, QuotaState(cycle.view)
    flexible_ids = cycle.snapshot.ledger.above_minimum
    for job in (
        cycle.snapshot.ledger.sort_by_submission(flexible_ids) if book else map(view.jobs.__getitem__, flexible_ids)
    ):
        if is_resizable(cycle, job):
            nodes = [view.nodes[name] for name in job.allocation.target]
            base = cycle.policies.starting_gpus(view, job, sizes, None)
            flexible = book.available_to_others(job, max(0, job.allocation.target_gpus - base))
            book.release(job, flexible)
            found[nodes[0].gpu, any(view.is_lent(node) for node in nodes)] += flexible
    return found


@dataclass(slots=True)
class Reservation:
    """`job_id` can start at `at_s` on GPUs of `model` if nobody delays it, and `extra_gpus` of them are left then.

    Mutable: extra GPUs are dealt out.
    """

    job_id: str
    start_at_s: float
    model: str
    extra_gpus: int

    def permits(self, model: str, gpus: int, end_s: float) -> bool:
        """A job that would end at `end_s` may start on these GPUs."""
        return model != self.model or end_s <= self.start_at_s or gpus <= self.extra_gpus

    def charge(self, model: str, gpus: int, end_s: float) -> None:
        """A job that may start does."""
        if model == self.model and end_s > self.start_at_s:
            self.extra_gpus -= gpus


def reserve(cycle: SchedulingCycle, job: Job, kinds: Collection[GpuKind], need: int, free: int) -> Reservation | None:
    """The shadow of a job that needs `need` GPUs of these kinds, of one model, while `free` are free or can be; None
    where no end is known of enough running jobs."""
    (model,) = {model for model, _ in kinds}
    extra, at_s = free - need, cycle.now_s
    for end_s, job_id in _list_expected_ends(cycle) if extra < 0 else ():
        extra, at_s = extra + _count_base_gpus(cycle, cycle.view.jobs[job_id], kinds), end_s
        if extra >= 0:
            break
    return Reservation(job.id, at_s, model, extra) if extra >= 0 else None


def _list_expected_ends(cycle: SchedulingCycle) -> list[tuple[float, str]]:
    """When each running job of known length is expected to end, soonest first."""
    running = map(cycle.view.jobs.__getitem__, cycle.snapshot.ledger.running)
    ends = ((expected_end_s(job, cycle.now_s), job.id) for job in running)
    return sorted(end for end in ends if end[0] < inf)


def _count_base_gpus(cycle: SchedulingCycle, job: Job, kinds: Collection[GpuKind]) -> int:
    """What a job gives back of its base on nodes of these kinds when it ends."""
    held = sum(len(indices) for name, indices in job.allocation.target.items() if _kind_of_node(cycle, name) in kinds)
    return min(held, cycle.policies.starting_gpus(cycle.view, job, cycle.node_sizes, None)) if held else 0


def expected_end_s(job: Job, now_s: float) -> float:
    """When a running job ends at its present speed; infinite where its length is unknown."""
    steps = job.remaining_steps(now_s)
    return inf if steps is None else now_s + steps * job.step_time_s()


def _kind_of_node(cycle: SchedulingCycle, name: str) -> GpuKind | None:
    node = cycle.view.nodes.get(name)
    return (node.gpu, cycle.view.is_lent(node)) if node else None
