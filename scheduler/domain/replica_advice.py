"""ReplicaAdvice: the replicas proposed for a model, which rise at once and fall after a stabilization window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.domain.serving import ModelLoad, ServedModel, SizingMode, SizingPolicy


@dataclass(frozen=True, slots=True)
class SteadyCount:
    """Replicas that would have been kept at a reading."""

    at_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class ReplicaAdvice:
    """The proposed number of replicas of a model since `since_s`.

    Args:
        recent: readings within the stabilization window whose count no later reading reaches, oldest first: its first
            entry is the maximum of the window.
    """

    model: str
    replicas: int
    since_s: float
    recent: tuple[SteadyCount, ...] = ()

    def observe(self, load: ModelLoad, policy: SizingPolicy, at_s: float) -> ReplicaAdvice:
        """Return the advice after a reading that is not older than the last one.

        The number rises at once to what the expected rate needs. It falls to the largest number of the window that a
        slightly higher rate would have needed. This margin is a dead band: a rate that varies by less than it never
        moves the number down and up again. The window is that of a HorizontalPodAutoscaler's `scaleDown`.
        """
        needed, steady = policy.clamp(load.ahead_replicas), policy.clamp(load.steady_replicas)
        begin_s = at_s - policy.stabilization_s
        kept = [each for each in self.recent if each.at_s >= begin_s and each.replicas > steady]
        recent = (*kept, SteadyCount(at_s, steady))
        replicas = policy.clamp(max(needed, min(self.replicas, recent[0].replicas)))
        since_s = self.since_s if replicas == self.replicas else at_s
        return ReplicaAdvice(self.model, replicas, since_s, recent)


def advise_replicas(
    before: Iterable[ReplicaAdvice], models: Iterable[ServedModel], loads: Iterable[ModelLoad], at_s: float
) -> tuple[ReplicaAdvice, ...]:
    """Return the advice for the models that are sized, after a reading at `at_s`, in the order of the loads."""
    known = {advice.model: advice for advice in before}
    policies = {each.model: each.sizing for each in models if each.sizing.mode is not SizingMode.OFF}
    advice = []
    for load in loads:
        if (policy := policies.get(load.model)) is not None:
            first = ReplicaAdvice(load.model, policy.clamp(load.ahead_replicas), at_s)
            advice.append(known.get(load.model, first).observe(load, policy, at_s))
    return tuple(advice)


def count_demanded_gpus(
    models: Iterable[ServedModel], loads: Iterable[ModelLoad], advice: Iterable[ReplicaAdvice]
) -> float:
    """Return the GPUs of the replicas: as proposed for models that are scaled, as needed now for all others."""
    scaled = {each.model for each in models if each.sizing.mode is SizingMode.SCALE}
    proposed = {each.model: each.replicas for each in advice if each.model in scaled}
    return float(sum(load.gpus * proposed.get(load.model, load.replicas) for load in loads))
