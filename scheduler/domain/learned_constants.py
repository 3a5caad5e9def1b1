"""Learned constants: how much longer the causes of a step take than the GPU profiles say, as jobs have measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from scheduler.domain.parallel_plan import STEP_TERMS, ParallelPlan

LEVEL_RATIO = 1.25
"""Ratio of the times of two neighbouring levels. Levels are whole numbers, so that jobs share curves."""
LEVEL_MAX = 16
"""Largest level: 36 times as long as in the profile. The smallest is its negative."""

ADJUSTABLE_TERMS = frozenset({"compute", "node_links", "network", "fixed"})
"""The STEP_TERMS with constants of their own in a GPU profile. The optimizer step is limited by memory bandwidth, and
so goes with `compute`. Experts' tokens pass the same links as all else."""

Levels = tuple[int, ...]
"""A level for each of STEP_TERMS. At level n, what the term stands for takes LEVEL_RATIO^n times as long."""
LearnedConstants = tuple[tuple[str, Levels], ...]
"""Pairs (GPU model, levels), sorted by GPU model, without models at which all levels are 0."""


def list_factors(constants: LearnedConstants, gpu: str) -> tuple[float, ...]:
    """Return the factor on the time of each of STEP_TERMS on a GPU model."""
    levels = dict(constants).get(gpu, (0,) * len(STEP_TERMS))
    return tuple(LEVEL_RATIO**level for level in levels)


def describe_constants(constants: LearnedConstants) -> str:
    """Return what differs from the profiles, such as `network of a100-80g takes 7.5 times as long`."""
    parts = [
        f"{name.replace('_', ' ')} of {gpu} takes {LEVEL_RATIO**level:.2g} times as long as in its profile"
        for gpu, levels in constants
        for name, level in zip(STEP_TERMS, levels, strict=True)
        if level
    ]
    return ", ".join(parts) or "measured steps agree with the profiles again"


def predict_step_s(plan: ParallelPlan, constants: LearnedConstants) -> float:
    """Return the step time of a plan in seconds, predicted by the profiles with these constants.

    A plan that mixes GPU models, or that the cost model did not predict, keeps its prediction.
    """
    if not plan.terms or plan.is_mixed:
        return plan.iteration_time_s
    factors = list_factors(constants, plan.stages[0].gpu)
    scaled = sum(share * factor for share, factor in zip(plan.terms, factors, strict=True))
    return plan.profile_time_s * scaled / sum(plan.terms)


def rebase_correction(plan: ParallelPlan, correction: float, constants: LearnedConstants) -> float:
    """Return measured over predicted step time under `constants`, for a plan measured at `correction` of its own.

    It stays within LEVEL_RATIO of 1: the constants have learned the rest. The terms of a plan leave out the
    communication that computation hides, and a slower network exposes it, so a larger correction would be an artefact.
    """
    rebased = correction * plan.iteration_time_s / predict_step_s(plan, constants)
    return min(max(rebased, 1.0 / LEVEL_RATIO), LEVEL_RATIO)


@dataclass(frozen=True, slots=True)
class CurveConstants:
    """Constants of a job: the newest ones, those of its curve, and those of the curve that its plan is from.

    The curve follows the newest constants once it is solved, and the plan follows when the job gets a new one.
    """

    newest: LearnedConstants = ()
    curve: LearnedConstants = ()
    plan: LearnedConstants = ()

    @property
    def is_curve_current(self) -> bool:
        return self.curve == self.newest

    @property
    def needs_new_plan(self) -> bool:
        return self.plan != self.newest

    def with_current_curve(self) -> CurveConstants:
        return replace(self, curve=self.newest)

    def with_new_plan(self) -> CurveConstants:
        """Return the constants of a job that received a new plan from its curve."""
        return replace(self, plan=self.curve)


NO_CONSTANTS = CurveConstants()


def settle_levels(known: Levels, log_factors: Sequence[float]) -> Levels:
    """Return the levels for newly learned logarithms of factors. A level stays unless it moves by 1 or more."""
    wanted = (each / log(LEVEL_RATIO) for each in log_factors)
    return tuple(
        level if abs(exact - level) < 1.0 else max(-LEVEL_MAX, min(LEVEL_MAX, round(exact)))
        for level, exact in zip(known, wanted, strict=True)
    )
