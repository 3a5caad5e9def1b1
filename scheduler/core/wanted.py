"""Which points of the scaling curves are missing, in the order in which they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scheduler.core.frozen_layers import shapes_to_solve
from scheduler.domain.gpu_shape import canonical_counts
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import WantedShape
from scheduler.policies.speed import node_sizes, packed


def wanted_shapes(snapshot: Snapshot, missed: Iterable[WantedShape]) -> tuple[WantedShape, ...]:
    """Unsolved shapes, each once: minimums of jobs that cannot queue without them, shapes that this tick looked
    for in vain, those of curves that count on newly frozen layers, then the rest of every job's canonical shapes."""
    found = dict.fromkeys((*_minimums(snapshot), *missed, *_refrozen(snapshot), *_canonical(snapshot)))
    return tuple(wanted for wanted in found if not _is_solved(snapshot, wanted))


def _minimums(snapshot: Snapshot) -> Iterator[WantedShape]:
    sizes = node_sizes(snapshot)
    for job in snapshot.ledger.ordered(snapshot.ledger.unsettled & snapshot.ledger.profiled):
        if job.state in (JobState.SUBMITTED, JobState.PLANNING):
            for gpu in sorted(sizes):
                if job.spec.gpu in ("", gpu):
                    yield WantedShape(job.curve_key, packed(gpu, job.spec.min_gpus, sizes[gpu]))


def _refrozen(snapshot: Snapshot) -> Iterator[WantedShape]:
    ledger = snapshot.ledger
    for job in ledger.ordered(ledger.refrozen):
        if not job.freezing.is_on_curve:
            yield from (WantedShape(job.next_curve_key, shape) for shape in shapes_to_solve(snapshot, job))


def _canonical(snapshot: Snapshot) -> Iterator[WantedShape]:
    sizes = node_sizes(snapshot)
    ranges = {
        (job.curve_key, gpu, job.spec.min_gpus, job.spec.max_gpus)
        for job in map(snapshot.jobs.__getitem__, snapshot.ledger.profiled)
        for gpu in sizes
        if job.spec.gpu in ("", gpu)
    }
    for curve_key, gpu, least, most in sorted(ranges):
        for count in canonical_counts(least, most, sizes[gpu]):
            yield WantedShape(curve_key, packed(gpu, count, sizes[gpu]))


def _is_solved(snapshot: Snapshot, wanted: WantedShape) -> bool:
    curve = snapshot.curves.get(wanted.curve_key)
    return curve is not None and curve.is_solved(wanted.shape)
