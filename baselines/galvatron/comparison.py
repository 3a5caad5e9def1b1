"""Comparison with Galvatron: our plan under its cost model, next to a plan given as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import accumulate, groupby, pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from baselines.galvatron.cost_model import GalvatronPlan, evaluate_plan
from baselines.galvatron.plan_search import search_plan
from baselines.galvatron.profile_reader import read_case
from baselines.galvatron.profiles import GalvatronCase, JsonField
from baselines.galvatron.strategy_space import (
    MemoryLimitReading,
    PipelineSetting,
    Strategy,
    compute_memory_limit_mb,
    enumerate_strategy_sets,
    split_evenly,
)
from scheduler.domain import parallel_plan as domain
from scheduler.solver.profiles.profile_document import ProfileError

_LABEL = re.compile(r"([1-9]\d{0,8})-([1-9]\d{0,8})\*?-([1-9]\d{0,8})(f?)(-c)?(-sp)?", re.ASCII)
_TENSOR_ONLY, _ULYSSES_ONLY, _BOTH = "tp_only", "sp_only", "tp_with_sp"
_SUPPORTED = (
    "1F1B of one chunk a stage; tp with its sequence sharded, or ulysses; dp; zero 0, 2 or 3; recompute none or full"
)


def compare_with_galvatron(folder: Path, reading: MemoryLimitReading, plan_file: Path | None = None) -> dict[str, Any]:
    """Return JSON values: `ours`, or why it is `infeasible` and by which `constraint`; and `given` if a plan is given.

    A plan has the form of `plan_to_json`, with `embedding` (its strategy's label), `buffer_degree`, `fits` and the
    `evaluation` under Galvatron's model. `given` also has `speed_up`: its judged time over ours.

    Raises:
        ProfileError: the profile folder or the given plan is invalid.
    """
    case = read_case(folder)
    cap = compute_memory_limit_mb(case.memory_gb, reading)
    facts = {"model": case.model.name, "gpus": case.cluster.gpus, "memory_gb": case.memory_gb}
    answer: dict[str, Any] = {**facts, "memory_reading": reading.value, "memory_mb_max": cap}
    given = None if plan_file is None else parse_plan(JsonField.from_file(plan_file), case, cap)
    found = search_plan(case, cap)
    answer["candidates"] = found.candidates
    if found.plan is not None:
        answer["ours"] = _evaluated_plan_to_json(found.plan, case, cap, found.optimality_gap)
    elif isfinite(found.least_mb):
        answer["infeasible"] = f"the leanest plan takes {found.least_mb:.0f} MB per GPU; the limit is {cap} MB"
        answer["constraint"] = "memory"
    else:
        answer["infeasible"] = f"a batch of {case.global_batch} cannot be split evenly by any degrees"
        answer["constraint"] = "batch"
    if given is not None:
        answer["given"] = _evaluated_plan_to_json(given, case, cap)
        if found.evaluation is not None:
            answer["given"]["speed_up"] = answer["given"]["iteration_time_s"] / found.evaluation.judged_s
    return answer


def _evaluated_plan_to_json(
    plan: GalvatronPlan, case: GalvatronCase, memory_limit_mb: int, gap: float | None = None
) -> dict[str, Any]:
    """Evaluate a plan as JSON. A `gap` of None means that nothing is proven. The profile does not name its GPU."""
    evaluation, count = evaluate_plan(plan, case), len(plan.stages)
    stages = tuple(
        domain.Stage(first, end - 1, "profiled", case.cluster.gpus // count, runs)
        for (first, end), layers in zip(pairwise([0, *accumulate(plan.sizes)]), plan.stages, strict=True)
        for runs in [tuple(to_layer_strategy(strategy, len(list(run))) for strategy, run in groupby(layers))]
    )
    shared = domain.ParallelPlan(
        schedule=domain.Schedule(),
        micro_batches=plan.micro_batches,
        micro_batch_size=case.global_batch // plan.micro_batches,
        iteration_time_s=evaluation.judged_s,
        samples_per_s=case.global_batch / evaluation.judged_s,
        peak_bytes_per_gpu=max(evaluation.memory_mb) * 2**20,
        stages=stages,
    )
    return {
        **domain.plan_to_json(shared),
        "optimality_gap": gap,
        "embedding": plan.embedding.label(count),
        "buffer_degree": plan.buffer_degree,
        "fits": max(evaluation.memory_mb) <= memory_limit_mb,
        "evaluation": asdict(evaluation),
    }


def parse_plan(document: JsonField, case: GalvatronCase, memory_limit_mb: int) -> GalvatronPlan:
    """Parse a plan for `case`: Galvatron's `result.json` (or only its `best`), or a plan of ours from `plan_to_json`.

    Neither form has a place for the strategy of embedding and head; a member `embedding` with its label may name it.
    Otherwise the strategy with the shortest judged time is taken, of those within `memory_limit_mb` if there are any.

    Raises:
        ProfileError: a field is missing or invalid, or the plan uses features that Galvatron's model cannot cost.
    """
    best = document.get("best", document.value)
    if "layer_runs" in best.members():
        plan, mode = _parse_galvatron_plan(best, case), best["tp_sp_mode"].value
    else:
        plan, mode = _parse_own_plan(best, case), _BOTH
    if "embedding" in best.members():
        return replace(plan, embedding=parse_label(best["embedding"], len(plan.stages)))
    found = [
        (max(evaluation.memory_mb) > memory_limit_mb, evaluation.judged_s, number, tried)
        for number, tried in enumerate(_enumerate_embeddings(plan, case))
        if (mode != _TENSOR_ONLY or tried.embedding.ulysses == 1)
        and (mode != _ULYSSES_ONLY or tried.embedding.tensor == 1)
        for evaluation in [evaluate_plan(tried, case)]
    ]
    if not found:
        best.reject(f"a plan whose buffer degree ({plan.buffer_degree}) some strategy of the embedding shares")
    return min(found)[3]


def parse_label(entry: JsonField, stages: int) -> Strategy:
    """Parse the strategy of a label such as `2-4*-2f-c`; data parallelism without `f` is ZeRO-2.

    Raises:
        ProfileError: it is not a label, or has another number of stages.
    """
    found = _LABEL.fullmatch(entry.read_text())
    if found is None or int(found[1]) != stages:
        entry.reject(f"of the form {stages}-tp[*]-dp[f][-c][-sp], such as '{stages}-4*-2f-c'")
    degree, data = int(found[2]), int(found[3])
    tensor, ulysses = (1, degree) if found[6] else (degree, 1)
    return Strategy(tensor, ulysses, data, 3 if found[4] else 2 if data > 1 else 0, bool(found[5]))


def to_layer_strategy(strategy: Strategy, layers: int) -> domain.LayerStrategy:
    """Return the strategy in the form that all planners share.

    Galvatron's tensor parallelism shards the sequence between its messages.
    """
    return domain.LayerStrategy(
        layers=layers,
        tp=strategy.tensor,
        sequence_sharding=strategy.tensor > 1,
        dp=strategy.data,
        zero=strategy.zero,
        shard_group=strategy.replicas if strategy.zero else 1,
        ulysses=strategy.ulysses,
        recompute=domain.Recompute.FULL if strategy.recompute else domain.Recompute.NONE,
    )


def _enumerate_embeddings(plan: GalvatronPlan, case: GalvatronCase) -> Iterator[GalvatronPlan]:
    """Yield the plan with each embedding strategy that its buffer serves."""
    setting = PipelineSetting(case, len(plan.stages), plan.micro_batches)
    for degree, strategies in enumerate_strategy_sets(setting, restricted=False):
        if (degree or 1) == (plan.buffer_degree or 1):
            yield from (replace(plan, embedding=strategy) for strategy in strategies if not strategy.recompute)


def _parse_galvatron_plan(best: JsonField, case: GalvatronCase) -> GalvatronPlan:
    """Parse runs of layers under Galvatron's labels; stages are even."""
    stages, mode = best["pp"].read_int(), best["tp_sp_mode"].read_choice(_TENSOR_ONLY, _ULYSSES_ONLY, _BOTH)
    layers: list[Strategy] = []
    for run in best["layer_runs"].items():
        label, count = run.items() if len(run.items()) == 2 else run.reject("a label and a number of layers")
        layers += [parse_label(label, stages)] * count.read_int(case.model.layers)
    cut = [0, *accumulate(split_evenly(len(layers), stages))]
    return GalvatronPlan(
        stages=tuple(tuple(layers[first:end]) for first, end in pairwise(cut)),
        embedding=Strategy(),
        micro_batches=best["chunks"].read_int(),
        buffer_degree=None if mode == _ULYSSES_ONLY else best["global_buffer_tp"].read_int(),
    )


def _parse_own_plan(document: JsonField, case: GalvatronCase) -> GalvatronPlan:
    """Parse a plan of ours. A strategy that differs after conversion to Galvatron's terms has no price in its model."""
    document.members()
    try:
        plan = domain.plan_from_json(document.value)
        runs = [[(_parse_strategy(run, case.model.layers), run) for run in stage.strategies] for stage in plan.stages]
    except ValueError as error:
        raise ProfileError(f"{document.name}: {error}") from error
    known = all(to_layer_strategy(strategy, run.layers) == run for stage in runs for strategy, run in stage)
    if not known or plan.schedule != domain.Schedule():
        raise ProfileError(f"{document.name} is {plan.summarize()}; Galvatron's model supports {_SUPPORTED}")
    micro_batches, samples = document["micro_batches"].read_int(), document["micro_batch_size"].read_int()
    if micro_batches * samples != case.global_batch:
        document["micro_batch_size"].reject(f"{case.global_batch} / {micro_batches}, the batch over the micro-batches")
    tensor = max((strategy.tensor for stage in runs for strategy, _ in stage), default=1)
    degree = document.get("buffer_degree", tensor if tensor > 1 else None)
    return GalvatronPlan(
        stages=tuple(tuple(one for one, run in stage for _ in range(run.layers)) for stage in runs),
        embedding=Strategy(),
        micro_batches=micro_batches,
        buffer_degree=None if degree.value is None else degree.read_int(),
    )


def _parse_strategy(run: domain.LayerStrategy, layers_max: int) -> Strategy:
    JsonField("layers", run.layers).read_int(layers_max)
    tensor, ulysses, data = (JsonField(key, getattr(run, key)).read_int() for key in ("tp", "ulysses", "dp"))
    return Strategy(tensor, ulysses, data, run.zero, run.recompute is domain.Recompute.FULL)
