"""Stock: the GPUs that waiting jobs may have, free now or soon, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from math import inf

from scheduler.core.backfill import Shadow, cast_shadow
from scheduler.core.course import Claim, Course
from scheduler.core.targets import may_shrink
from scheduler.domain.job import Job
from scheduler.domain.ledger import Kind
from scheduler.policies.quota import QuotaBook
from scheduler.policies.speed import least_gpus, step_time_s

Wish = tuple[str, bool]
"""The GPU model that a job asks for, "" for any, and whether lent nodes will do."""


class Pile:
    """Counts of GPUs by kind, taken together, and the totals by model that were asked for, most first, worked out once
    for all jobs of one wish. Who changes the counts clears the totals."""

    def __init__(self, *counts: Counter[Kind]) -> None:
        self._counts = counts
        self.totals: dict[Wish, list[tuple[int, str]]] = {}

    def add_up(self, wish: Wish, choices: Iterable[tuple[str, list[Kind]]]) -> list[tuple[int, str]]:
        found = [(sum(gpus.get(kind, 0) for gpus in self._counts for kind in kinds), gpu) for gpu, kinds in choices]
        self.totals[wish] = sorted(found, key=lambda item: (-item[0], item[1]))
        return self.totals[wish]


class Stock:
    """What is left while the queue is dealt out in order. Mutable, and gone when `start_waiting` is done.

    Counting by kind matters: a job that waits for one GPU model must not keep another model from those behind it.
    """

    def __init__(self, course: Course) -> None:
        self._snapshot = course.view
        self._sizes = course.node_sizes
        self._wishes: dict[Wish, list[tuple[str, list[Kind]]]] = {}
        self._needs: dict[tuple[str, str], int] = {}
        self._free: Counter[Kind] = Counter(course.draft.ledger.free)
        self._all: Counter[Kind] = Counter(course.draft.ledger.serving)
        self._closed: dict[Kind, str] = {}
        self._course = course
        self._shadow: Shadow | None = None
        self._withheld = False
        self._now, self._ever = Pile(self._free), Pile(self._all)
        self._changing = [self._now]

    @cached_property
    def _soon(self) -> Counter[Kind]:
        """What running jobs are giving up or could give up; nobody asks while everybody finds free GPUs."""
        soon = free_soon(self._course)
        for claim, gpus in self._course.evacuees.values():
            kind = (claim.gpu, not claim.owned_only)
            soon[kind] -= gpus
        return soon

    @cached_property
    def _later(self) -> Pile:
        self._changing.append(pile := Pile(self._free, self._soon))
        return pile

    def free(self, job: Job) -> int:
        """GPUs that the job may use and that are free now."""
        return sum(gpus for gpus, _ in self._totals(job, self._now))

    def left(self, gpu: str) -> int:
        """Free GPUs of this model that were dealt to nobody and are kept for nobody."""
        return sum(gpus for (model, _), gpus in self._free.items() if model == gpu)

    def need(self, job: Job) -> int:
        """GPUs that the job starts on, of the model of which it needs fewest."""
        return min([self._need(job, gpu) for gpu, _ in self._choices(job)], default=job.spec.min_gpus)

    def held_back_by(self, job: Job) -> str | None:
        """Why a job that is neither offered nor promised GPUs waits: the overdue job that keeps everybody behind it
        off those that this one could use, or the job that this one would delay."""
        if self._closed:
            closed = next((self._closed[kind] for kind in self._kinds(job) if kind in self._closed), None)
            if closed is not None:
                return closed
        return self._shadow.job_id if self._shadow and self._fits(job, self._later) else None

    def offer(self, job: Job) -> tuple[str, int] | None:
        """A GPU model and the fewest GPUs of it that the job can start on now; most free GPUs first."""
        return self._permitted(job, self._fits(job, self._now))

    def meagre_offer(self, job: Job) -> tuple[str, int] | None:
        """As `offer`, with the fewest GPUs that any plan works on, however inefficient it is."""
        for gpu, kinds in self._choices(job):
            least = least_gpus(self._snapshot, job, self._sizes, gpu)
            if least <= sum(self._free[kind] for kind in kinds):
                return gpu, least
        return None

    def promise(self, job: Job) -> tuple[str, int] | None:
        """As `offer`, with the GPUs that running jobs are giving up or could give up."""
        return self._permitted(job, self._fits(job, self._later))

    def shortage(self, job: Job) -> tuple[str, int, int] | None:
        """The GPU model of which the job lacks least, how many it needs, and how many are neither free nor given up."""
        found: list[tuple[int, str, int]] = []
        for gpu, kinds in self._choices(job):
            if sum(self._all[kind] for kind in kinds) >= (need := self._need(job, gpu)):
                found.append((need - self._free_soon(kinds), gpu, need))
        missing, gpu, need = min(found, default=(0, "", 0))
        return (gpu, need, missing) if missing > 0 else None

    def could_hold(self, job: Job) -> bool:
        """The job would fit if nobody else were there: waiting makes sense."""
        return bool(self._fits(job, self._ever))

    def come_to(self, job: Job) -> None:
        """The queue has come to this job: nodes that are kept for those before it are not there any more."""
        if not self._withheld and self._course.is_kept_from(job):
            self._withheld = True
            self._changed()
            for room in self._course.kept_rooms:
                self._free[room.gpu, room.lent] -= len(room.free)

    @property
    def keeps_a_start(self) -> bool:
        """Some job before has to wait, and nobody may delay the start that it has in sight."""
        return self._shadow is not None

    def keep_for(self, job: Job) -> None:
        """From now on nobody is offered GPUs that would delay this job, if it is the first that has to wait."""
        if self._course.policies.backfill and self._shadow is None:
            shadows = [
                shadow
                for gpu, kinds in self._choices(job)
                if (need := self._need(job, gpu)) <= sum(self._all[kind] for kind in kinds)
                and (shadow := cast_shadow(self._course, job, kinds, need, self._free_soon(kinds)))
            ]
            self._shadow = min(shadows, key=lambda shadow: shadow.at_s, default=None)

    def take(self, job: Job, gpu: str, gpus: int) -> None:
        """Deal out `gpus` free GPUs; a job's base goes onto owned nodes first."""
        self._pass(job, gpu, gpus)
        self._deduct(self._free, job, gpu, gpus)

    def reserve(self, job: Job, gpu: str, gpus: int) -> tuple[Claim, int]:
        """Keep what is free and promise the rest; returns how much has to be given up, and of what kind."""
        self._pass(job, gpu, gpus)
        missing = gpus - self._deduct(self._free, job, gpu, gpus)
        self._deduct(self._soon, job, gpu, missing)
        return Claim(gpu, owned_only=not job.spec.fungible), missing

    def close(self, job: Job) -> None:
        """Nobody behind this job gets anything that it could use."""
        self._changed()
        for kind in self._kinds(job):
            self._closed.setdefault(kind, job.id)
            self._free[kind] = self._soon[kind] = 0

    def _changed(self) -> None:
        for pile in self._changing:
            pile.totals.clear()

    def _kinds(self, job: Job) -> list[Kind]:
        return [kind for _, kinds in self._choices(job) for kind in kinds]

    def _choices(self, job: Job) -> list[tuple[str, list[Kind]]]:
        """Each GPU model that the job may use, with its kinds."""
        wish = (job.spec.gpu, job.spec.fungible)
        if wish not in self._wishes:
            models = [job.spec.gpu] if job.spec.gpu else sorted(self._sizes)
            kinds = (False, True) if job.spec.fungible else (False,)
            self._wishes[wish] = [(gpu, [(gpu, lent) for lent in kinds]) for gpu in models]
        return self._wishes[wish]

    def _free_soon(self, kinds: Iterable[Kind]) -> int:
        return sum(self._free[kind] + self._soon[kind] for kind in kinds)

    def _permitted(self, job: Job, fitting: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
        """The first of these GPU models and counts on which the job delays nobody who comes before it."""
        if self._shadow is None:
            return next(iter(fitting), None)
        shadow = self._shadow
        return next((fit for fit in fitting if shadow.permits(*fit, self._end_s(job, *fit))), None)

    def _pass(self, job: Job, gpu: str, gpus: int) -> None:
        if self._shadow:
            self._shadow.take(gpu, gpus, self._end_s(job, gpu, gpus))

    def _end_s(self, job: Job, gpu: str, gpus: int) -> float:
        """When the job would end if it started now; infinite where its length or its speed is unknown."""
        steps = job.remaining_steps(self._snapshot.now_s)
        return inf if steps is None else self._snapshot.now_s + steps * self._step_s(job, gpu, gpus)

    def _step_s(self, job: Job, gpu: str, gpus: int) -> float:
        step_s = step_time_s(self._snapshot, job, gpus, self._sizes, gpu)
        return inf if step_s is None else step_s

    def _fits(self, job: Job, pile: Pile) -> list[tuple[str, int]]:
        """The GPU models with enough GPUs on the pile for the job, and how many it needs of each: first the model on
        which its curve is fastest, of equals the one with most GPUs."""
        least = job.spec.min_gpus
        fitting: list[tuple[str, int]] = []
        for total, gpu in self._totals(job, pile):
            if total < least:
                break
            if (need := self._need(job, gpu)) <= total:
                fitting.append((gpu, need))
        return sorted(fitting, key=lambda fit: self._step_s(job, *fit)) if len(fitting) > 1 else fitting

    def _totals(self, job: Job, pile: Pile) -> list[tuple[int, str]]:
        wish = (job.spec.gpu, job.spec.fungible)
        return pile.totals.get(wish) or pile.add_up(wish, self._choices(job))

    def _need(self, job: Job, gpu: str) -> int:
        if (job.id, gpu) not in self._needs:
            self._needs[job.id, gpu] = self._course.policies.base(self._snapshot, job, self._sizes, gpu)
        return self._needs[job.id, gpu]

    def _deduct(self, gpus: Counter[Kind], job: Job, gpu: str, wanted: int) -> int:
        taken = 0
        self._changed()
        for kind in self._kinds(job):
            if kind[0] == gpu:
                part = min(gpus[kind], wanted - taken)
                gpus[kind] -= part
                taken += part
        return taken


def free_soon(course: Course) -> Counter[Kind]:
    """GPUs that running jobs are giving up or could give up."""
    return releasing_by_kind(course) + _flexible_by_kind(course)


def releasing_by_kind(course: Course) -> Counter[Kind]:
    """GPUs that jobs are giving up on nodes that training may go on using: they are free soon."""
    view = course.view
    found: Counter[Kind] = Counter()
    for job_id in course.draft.ledger.releasing:
        for name, indices in view.jobs[job_id].allocation.releasing.items():
            node = view.nodes.get(name)
            if node is not None and view.serves_training(node):
                found[node.gpu, view.is_lent(node)] += len(indices)
    return found


def _flexible_by_kind(course: Course) -> Counter[Kind]:
    """GPUs that running elastic jobs hold above their minimum and that may be taken now.

    A job with lent GPUs gives those up first, so all its flexible ones count as lent. What its queue holds of its
    guarantee is not counted: no other queue may have that.
    """
    found: Counter[Kind] = Counter()
    if course.policies.scale is None or course.draft.base.switches.resizes_frozen:
        return found
    view, sizes, book = course.view, course.node_sizes, QuotaBook(course.view)
    flexible_ids = course.draft.ledger.flexible
    for job in course.draft.ledger.ordered(flexible_ids) if book else map(view.jobs.__getitem__, flexible_ids):
        if may_shrink(course, job):
            nodes = [view.nodes[name] for name in job.allocation.target]
            base = course.policies.base(view, job, sizes, None)
            flexible = book.spare(job, max(0, job.allocation.target_gpus - base))
            book.give_back(job, flexible)
            found[nodes[0].gpu, any(view.is_lent(node) for node in nodes)] += flexible
    return found
