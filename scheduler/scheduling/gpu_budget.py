"""The GPUs that pending jobs can have in one pass over the queue, free now or soon, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from math import inf

from scheduler.domain.job import Job
from scheduler.domain.snapshot_index import GpuKind
from scheduler.scheduling.cycle import GpuDemand, ResourceKind, SchedulingCycle
from scheduler.scheduling.job_limits import LimitsByJob
from scheduler.scheduling.pending_gpus import count_pending_gpus
from scheduler.scheduling.policies.backfill import Reservation
from scheduler.scheduling.policies.speed import accepts_model, min_feasible_gpus, start_loss_s, step_time_s

GpuRequest = tuple[str, bool]
"""The GPU model that a job requires, "" for any, and whether it can use lent nodes."""


class CountsByKind:
    """Counts of GPUs by kind, and cached totals by model for each request.

    The owner of the counts clears the totals after a change.
    """

    def __init__(self, *counts: Counter[GpuKind]) -> None:
        self._counts = counts
        self.totals_by_request: dict[GpuRequest, list[tuple[int, str]]] = {}

    def compute_totals(
        self, request: GpuRequest, choices: Iterable[tuple[str, list[GpuKind]]]
    ) -> list[tuple[int, str]]:
        """Return the total of each GPU model, the largest first."""
        totals = [(sum(gpus.get(kind, 0) for gpus in self._counts for kind in kinds), gpu) for gpu, kinds in choices]
        self.totals_by_request[request] = sorted(totals, key=lambda item: (-item[0], item[1]))
        return self.totals_by_request[request]


class GpuBudget:
    """The GPUs that are left while jobs are served in the order of the queue.

    GPUs are counted by kind, so that a job that waits for one model does not block later jobs that need another.
    """

    def __init__(self, cycle: SchedulingCycle, moves: Mapping[str, GpuDemand]) -> None:
        """`moves`: GPUs that jobs on nodes to be vacated wait for."""
        self._moves = moves
        self._snapshot = cycle.view
        self._sizes = cycle.node_sizes
        self._kinds_by_request: dict[GpuRequest, list[tuple[str, list[GpuKind]]]] = {}
        self._needs: dict[tuple[str, str], int] = {}
        self._free: Counter[GpuKind] = Counter(cycle.index.free_gpus)
        self._serving: Counter[GpuKind] = Counter(cycle.index.training_gpus)
        self._blocked: dict[GpuKind, str] = {}
        self._cycle = cycle
        self._reservation: Reservation | None = None
        self._excludes_reserved_nodes = False
        self._free_counts, self._serving_counts = CountsByKind(self._free), CountsByKind(self._serving)
        self._mutable_counts = [self._free_counts]
        self._limits_for = LimitsByJob(cycle).find

    @cached_property
    def _pending(self) -> Counter[GpuKind]:
        """GPUs that running jobs give up or could give up. Not needed while every job finds free GPUs."""
        pending = count_pending_gpus(self._cycle)
        for demand in self._moves.values():
            pending[demand.kind.gpu, not demand.kind.owned_only] -= demand.gpus
        return pending

    @cached_property
    def _free_and_pending_counts(self) -> CountsByKind:
        self._mutable_counts.append(counts := CountsByKind(self._free, self._pending))
        return counts

    def free_gpus(self, job: Job) -> int:
        """Return the GPUs that are free now and that the job can use."""
        return sum(gpus for gpus, _ in self._free_totals(job))

    def unallocated_gpus(self, gpu: str) -> int:
        """Return the free GPUs of a model that are neither allocated nor blocked."""
        return sum(gpus for (model, _), gpus in self._free.items() if model == gpu)

    def needed_gpus(self, job: Job) -> int:
        """Return the GPUs that the job starts on, of the model of which it needs the fewest."""
        return min(
            [self._count_needed_of_model(job, gpu) for gpu, _ in self._kinds_by_model(job)], default=job.spec.min_gpus
        )

    def blocking_job(self, job: Job) -> str | None:
        """Return the earlier job that this one must not pass: an overdue one, or one that it would delay."""
        if self._blocked:
            blocking = next((self._blocked[kind] for kind in self._kinds_for(job) if kind in self._blocked), None)
            if blocking is not None:
                return blocking
        if self._reservation and self._fitting_models(job, self._free_or_pending_totals(job)):
            return self._reservation.job_id
        return None

    def offer(self, job: Job) -> tuple[str, int] | None:
        """Return a GPU model and how many GPUs of it the job can start on now, or None."""
        return self._first_permitted(job, self._acceptable_models(job, self._free_totals(job)))

    def refused_offer(self, job: Job) -> tuple[str, float] | None:
        """Return a slower GPU model on which the job could start now, and how many seconds later it would end there."""
        fitting = self._fitting_models(job, self._free_totals(job)) if len(self._sizes) > 1 else []
        refused = (gpu for gpu, _ in fitting if not self._accepts(job, gpu))
        return next(((gpu, start_loss_s(self._snapshot, job, gpu)) for gpu in refused), None)

    def min_feasible_offer(self, job: Job) -> tuple[str, int] | None:
        """Return an offer of the fewest GPUs with a feasible plan, however inefficient, or None."""
        for gpu, kinds in self._kinds_by_model(job):
            min_gpus = min_feasible_gpus(self._snapshot, job, self._sizes, gpu)
            if min_gpus <= self._limits_for(job).cap_free(self._free, kinds) and self._accepts(job, gpu):
                return gpu, min_gpus
        return None

    def pending_offer(self, job: Job) -> tuple[str, int] | None:
        """Return an offer that includes GPUs that running jobs give up or could give up, or None."""
        return self._first_permitted(job, self._acceptable_models(job, self._free_or_pending_totals(job)))

    def shortage(self, job: Job) -> tuple[str, int, int] | None:
        """Return the model of which the fewest GPUs are missing, how many the job needs, and how many are missing."""
        found: list[tuple[int, str, int]] = []
        limits = self._limits_for(job)
        for gpu, kinds in self._kinds_by_model(job):
            if limits.cap_alone(self._serving, kinds) >= (need := self._count_needed_of_model(job, gpu)):
                found.append((need - self._free_or_pending(job, kinds), gpu, need))
        missing, gpu, need = min(found, default=(0, "", 0))
        return (gpu, need, missing) if missing > 0 else None

    def largest_pool(self, job: Job) -> int:
        """Return the most GPUs of one model, free or not, that the job can use."""
        return max([gpus for gpus, _ in self._serving_totals(job)], default=0)

    def could_ever_fit(self, job: Job) -> bool:
        """Return whether the job would fit if it were alone."""
        return bool(self._fitting_models(job, self._serving_totals(job)))

    def begin_job(self, job: Job) -> None:
        """Remove nodes that are reserved for earlier jobs. Call once for each job, in order."""
        if not self._excludes_reserved_nodes and self._cycle.reservation.excludes(job):
            self._excludes_reserved_nodes = True
            self._invalidate_totals()
            for free in self._cycle.reserved_gpus:
                self._free[free.gpu, free.is_lent] -= len(free.indices)

    @property
    def has_reservation(self) -> bool:
        """Whether an earlier job that waits has a reserved start."""
        return self._reservation is not None

    def reserve_for(self, job: Job) -> None:
        """Reserve the earliest start of the job, if it is the first that has to wait."""
        policies = self._cycle.policies
        if policies.backfill is None or self._reservation is not None:
            return
        found: list[Reservation] = []
        limits = self._limits_for(job)
        for gpu, kinds in self._kinds_by_model(job):
            need = self._count_needed_of_model(job, gpu)
            if need > limits.cap_alone(self._serving, kinds) or not self._accepts(job, gpu):
                continue
            free, nodes = self._free_or_pending(job, kinds), limits.feasible_nodes
            reservation = policies.backfill(
                self._snapshot, job, kinds, need, free, starting_gpus=policies.starting_gpus, nodes=nodes
            )
            if reservation and nodes is not None:
                # GPUs that the job cannot use are left over for others.
                reservation.extra_gpus += max(0, sum(self._free[kind] for kind in kinds) - free)
            found += [reservation] if reservation else []
        self._reservation = min(found, key=lambda reservation: reservation.start_at_s, default=None)

    def allocate(self, job: Job, gpu: str, gpus: int) -> None:
        """Allocate free GPUs, those of owned nodes first."""
        self._charge_reservation(job, gpu, gpus)
        self._deduct(self._free, job, gpu, gpus)
        self._limits_for(job).charge(gpu, gpus)

    def allocate_pending(self, job: Job, gpu: str, gpus: int) -> GpuDemand:
        """Allocate free GPUs, and return the demand for those that running jobs must give up."""
        self._charge_reservation(job, gpu, gpus)
        limits = self._limits_for(job)
        missing = gpus - self._deduct(self._free, job, gpu, limits.cap_wanted(gpu, gpus))
        limits.charge(gpu, gpus)
        self._deduct(self._pending, job, gpu, missing)
        kind = ResourceKind(gpu, owned_only=not job.accepts_lent_nodes, nodes=limits.claimable_nodes)
        return GpuDemand(kind, missing)

    def block_behind(self, job: Job) -> None:
        """Keep all GPUs that the job could use from later jobs."""
        self._invalidate_totals()
        limits = self._limits_for(job)
        for kind in self._kinds_for(job):
            if limits.free is None:
                self._blocked.setdefault(kind, job.id)
                self._free[kind] = self._pending[kind] = 0
            else:
                self._free[kind] -= limits.cap_free(self._free, [kind])
                self._pending[kind] -= min(self._pending[kind], limits.pending[kind])

    def _invalidate_totals(self) -> None:
        for counts in self._mutable_counts:
            counts.totals_by_request.clear()

    def _kinds_for(self, job: Job) -> list[GpuKind]:
        return [kind for _, kinds in self._kinds_by_model(job) for kind in kinds]

    def _kinds_by_model(self, job: Job) -> list[tuple[str, list[GpuKind]]]:
        """Return each GPU model that the job can use, with its kinds."""
        request = (job.spec.gpu, job.accepts_lent_nodes)
        if request not in self._kinds_by_request:
            models = [gpu for gpu in sorted(self._sizes) if job.spec.gpu in ("", gpu)]
            kinds = (False, True) if job.accepts_lent_nodes else (False,)
            self._kinds_by_request[request] = [(gpu, [(gpu, lent) for lent in kinds]) for gpu in models]
        return self._kinds_by_request[request]

    def _free_or_pending(self, job: Job, kinds: Iterable[GpuKind]) -> int:
        return self._limits_for(job).cap_free_or_pending(self._free, self._pending, kinds)

    def _free_totals(self, job: Job) -> list[tuple[int, str]]:
        limits = self._limits_for(job)
        if limits.free is None:
            return self._totals_for(job, self._free_counts)
        return self._cap_totals(job, lambda kinds: limits.cap_free(self._free, kinds))

    def _free_or_pending_totals(self, job: Job) -> list[tuple[int, str]]:
        if not self._limits_for(job).limits_pending:
            return self._totals_for(job, self._free_and_pending_counts)
        return self._cap_totals(job, lambda kinds: self._free_or_pending(job, kinds))

    def _serving_totals(self, job: Job) -> list[tuple[int, str]]:
        limits = self._limits_for(job)
        if limits.alone is None:
            return self._totals_for(job, self._serving_counts)
        return self._cap_totals(job, lambda kinds: limits.cap_alone(self._serving, kinds))

    def _cap_totals(self, job: Job, count: Callable[[list[GpuKind]], int]) -> list[tuple[int, str]]:
        totals = [(count(kinds), gpu) for gpu, kinds in self._kinds_by_model(job)]
        return sorted(totals, key=lambda item: (-item[0], item[1]))

    def _first_permitted(self, job: Job, fitting: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
        """Return the first model and count on which the job does not delay the reserved start of an earlier one."""
        if self._reservation is None:
            return next(iter(fitting), None)
        reservation = self._reservation
        return next((fit for fit in fitting if reservation.permits(*fit, self._estimate_end_s(job, *fit))), None)

    def _charge_reservation(self, job: Job, gpu: str, gpus: int) -> None:
        if self._reservation:
            self._reservation.charge(gpu, gpus, self._estimate_end_s(job, gpu, gpus))

    def _estimate_end_s(self, job: Job, gpu: str, gpus: int) -> float:
        """Return when the job would end if it started now, infinity if its length or speed is unknown."""
        steps = job.remaining_steps(self._snapshot.now_s)
        return inf if steps is None else self._snapshot.now_s + steps * self._step_s(job, gpu, gpus)

    def _step_s(self, job: Job, gpu: str, gpus: int) -> float:
        step_s = step_time_s(self._snapshot, job, gpus, self._sizes, gpu)
        return inf if step_s is None else step_s

    def _fitting_models(self, job: Job, totals: Iterable[tuple[int, str]]) -> list[tuple[str, int]]:
        """Return the models of which the job finds enough GPUs, and how many it needs: the fastest model first.

        Of equally fast models, the one with the most GPUs comes first.
        """
        min_gpus = job.spec.min_gpus
        fitting: list[tuple[str, int]] = []
        for total, gpu in totals:
            if total < min_gpus:
                break
            if (need := self._count_needed_of_model(job, gpu)) <= total:
                fitting.append((gpu, need))
        return sorted(fitting, key=lambda fit: self._step_s(job, *fit)) if len(fitting) > 1 else fitting

    def _acceptable_models(self, job: Job, totals: Iterable[tuple[int, str]]) -> list[tuple[str, int]]:
        fitting = self._fitting_models(job, totals)
        return fitting if len(self._sizes) < 2 else [fit for fit in fitting if self._accepts(job, fit[0])]

    def _accepts(self, job: Job, gpu: str) -> bool:
        return len(self._sizes) < 2 or accepts_model(self._snapshot, job, gpu)

    def _totals_for(self, job: Job, counts: CountsByKind) -> list[tuple[int, str]]:
        request = (job.spec.gpu, job.accepts_lent_nodes)
        return counts.totals_by_request.get(request) or counts.compute_totals(request, self._kinds_by_model(job))

    def _count_needed_of_model(self, job: Job, gpu: str) -> int:
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
