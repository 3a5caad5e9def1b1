"""Policy sets: whole compositions of choices, by name. None of them has a memory between ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.domain.fleet import Pool
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.room import Room
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.lending import LendingTarget, lend_forecast_idle, lend_nothing
from scheduler.policies.ordering import first_come, shortest_remaining
from scheduler.policies.placement import best_fit
from scheduler.policies.reclaiming import least_preemption_cost
from scheduler.policies.scaling import flexible_counts, least_gain_first
from scheduler.policies.settings import PolicySettings

Order = Callable[[Snapshot, PolicySettings], tuple[str, ...]]
Lend = Callable[[Snapshot, Pool, PolicySettings], LendingTarget]
Reclaim = Callable[[Snapshot, str, int, PolicySettings], tuple[str, ...]]
Scale = Callable[[Snapshot, Iterable[str], int, PolicySettings], Mapping[str, int]]
MakeRoom = Callable[[Snapshot, int, PolicySettings], Mapping[str, int]]
Place = Callable[[Snapshot, Iterable[Room], Job, int], Gpus | None]


@dataclass(frozen=True, slots=True)
class PolicySet:
    """One choice a question. `scale` None: jobs stay at their minimum. `strict`: nobody passes the queue's head."""

    name: str
    summary: str
    order: Order
    lend: Lend
    reclaim: Reclaim
    scale: Scale | None
    make_room: MakeRoom
    place: Place
    strict: bool = False
    settings: PolicySettings = field(default_factory=PolicySettings)

    @property
    def scales(self) -> bool:
        return self.scale is not None

    @property
    def lends(self) -> bool:
        return self.lend is not lend_nothing


def policy_set(name: str, settings: PolicySettings | None = None) -> PolicySet:
    """The named set.

    Raises:
        ValueError: there is no set of this name; the message lists those there are.
    """
    settings = settings or PolicySettings()
    if name == "ebbtide":
        return PolicySet(
            name="ebbtide",
            summary="lends forecast-idle nodes, shortest remaining first with ageing, scales by curve gains",
            order=shortest_remaining,
            lend=lend_forecast_idle,
            reclaim=least_preemption_cost,
            scale=flexible_counts,
            make_room=least_gain_first,
            place=best_fit,
            settings=settings,
        )
    if name == "fifo":
        return PolicySet(
            name="fifo",
            summary="strictly first come, first served; neither lends nor scales (the baseline)",
            order=first_come,
            lend=lend_nothing,
            reclaim=least_preemption_cost,
            scale=None,
            make_room=least_gain_first,
            place=best_fit,
            strict=True,
            settings=settings,
        )
    raise ValueError(f"policy: {name!r} is not known; allowed: {', '.join(policy_set_names())}")


def policy_set_names() -> tuple[str, ...]:
    return ("ebbtide", "fifo")
