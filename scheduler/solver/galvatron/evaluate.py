"""Judges a given plan under Galvatron's cost model: the one yardstick for its plans and ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from scheduler.solver.galvatron.costs import embedding_mb, embedding_time, layer_mb, layer_time, transition_s
from scheduler.solver.galvatron.profile import GalvatronCase
from scheduler.solver.galvatron.setting import Setting, Strategy, even_cut
from scheduler.solver.instance import Objective
from scheduler.solver.profiles.profile_error import ProfileError


@dataclass(frozen=True, slots=True)
class GalvatronPlan:
    """A strategy for each layer of each stage, one for embedding and head, and the shared gathering buffer.

    Stages may be uneven. `buffer_degree` is the largest tensor degree that the buffer serves, None without one.
    """

    stages: tuple[tuple[Strategy, ...], ...]
    embedding: Strategy
    micro_batches: int
    buffer_degree: int | None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.stages))


@dataclass(frozen=True, slots=True)
class GalvatronEvaluation:
    """Time and memory of a plan.

    `iteration_s` is Galvatron's final time, `bottleneck_s` the same with the slowest stage setting the pace, and never
    less. `judged_s` is the former for Galvatron's own even cut and the latter for any other: its final time counts
    middle stages once only, however slow, and says far too little of uneven ones.

    `unhidden_reduction_s` is part of both. `transition_s`, per micro-batch, is part of neither: Galvatron's final time
    lets layers change their split for nothing. `stages_s` is each stage's micro-batch, `memory_mb` on each of its GPUs.
    """

    iteration_s: float
    bottleneck_s: float
    judged_s: float
    unhidden_reduction_s: float
    transition_s: float
    stages_s: tuple[float, ...]
    memory_mb: tuple[int, ...]


def evaluate(plan: GalvatronPlan, case: GalvatronCase) -> GalvatronEvaluation:
    """Time and memory of `plan`.

    Raises:
        ProfileError: the plan does not cover the model's layers, does not fill the cluster, or needs a degree that was
            not profiled.
    """
    _check(plan, case)
    setting = Setting(case, len(plan.stages), plan.micro_batches)
    times = {strategy: layer_time(strategy, setting) for stage in plan.stages for strategy in set(stage)}
    stages_s, reductions_s = [], []
    for number, stage in enumerate(plan.stages):
        embedding = embedding_time(plan.embedding, setting, number)
        stages_s.append(sum(times[strategy].compute_s for strategy in stage) + embedding.compute_s)
        reductions_s.append(sum(times[strategy].synced_s for strategy in stage))
    # The reduction of the embedding and head is never counted.
    over_s = (synced_s - so_far for synced_s, so_far in zip(reductions_s, accumulate(stages_s), strict=True))
    unhidden_s = max(0.0, *over_s)
    iteration_s = pipeline_s(stages_s, plan.micro_batches) + unhidden_s
    bottleneck_s = Objective(plan.micro_batches).time_s(sum(stages_s), max(stages_s)) + unhidden_s
    even = plan.sizes == even_cut(case.model.layers, setting.stages)
    return GalvatronEvaluation(
        iteration_s=iteration_s,
        bottleneck_s=bottleneck_s,
        judged_s=iteration_s if even else bottleneck_s,
        unhidden_reduction_s=unhidden_s,
        transition_s=sum(transition_s(*pair, setting) for stage in plan.stages for pair in pairwise(stage)),
        stages_s=tuple(stages_s),
        memory_mb=tuple(_memory_mb(plan, setting, stage) for stage in range(setting.stages)),
    )


def pipeline_s(stages_s: Sequence[float], micro_batches: int) -> float:
    """Galvatron's time of `micro_batches` through stages of times A, before the unhidden reduction; S is their sum.

    The larger of two pipelines, led by the last and by the first stage: S + (c - 1) A_last, and
    max(w A_first, S - A_first) + A_first max(0, c + 1 - p) with w = min(p, c) - 1. It falls with none of the times.
    """
    count, total_s, first_s = len(stages_s), sum(stages_s), stages_s[0]
    led_by_last_s = total_s + (micro_batches - 1) * stages_s[-1]
    warm_up_s = max((min(count, micro_batches) - 1) * first_s, total_s - first_s)
    return max(led_by_last_s, warm_up_s + first_s * max(0, micro_batches + 1 - count))


def _check(plan: GalvatronPlan, case: GalvatronCase) -> None:
    if not plan.stages or min(plan.sizes) < 1 or sum(plan.sizes) != case.model.layers:
        allowed = f"it must be one or more each, {case.model.layers} in all"
        raise ProfileError(f"plan: layers by stage is {list(plan.sizes)}; {allowed}")
    if plan.embedding.recompute:
        raise ProfileError(f"plan: embedding is {plan.embedding.label(len(plan.stages))}; it must be without recompute")
    tensor, degree = (
        max(one.tensor for stage in (*plan.stages, [plan.embedding]) for one in stage),
        plan.buffer_degree or 1,
    )
    if tensor > degree or case.cluster.gpus // len(plan.stages) % degree:
        allowed = f"it must divide the GPUs of a stage and be at least {tensor}, the largest tensor degree"
        raise ProfileError(f"plan: buffer degree is {plan.buffer_degree}; {allowed}")


def _memory_mb(plan: GalvatronPlan, setting: Setting, stage: int) -> int:
    layers = sum(layer_mb(strategy, setting, stage) for strategy in plan.stages[stage])
    return layers + embedding_mb(plan.embedding, setting, stage, plan.buffer_degree)
