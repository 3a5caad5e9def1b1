"""Errors of step times after learning from a few measured plans, compared with those of one correction per job.

`python -m tests.benchmarks learning` prints them. A correction per job is the geometric mean of measured / predicted
over its rows. All predictions start from shipped constants, except those of vTrain, whose start is VTRAIN_GUESS.

The prior spread is the most probable one given the drawn rows, so no row that is predicted takes part in its choice.
One row a count shows the default spread, which needs no choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from time import perf_counter

import numpy as np

from scheduler.domain.codec import encode_as
from scheduler.domain.step_measurements import ROWS_MAX, ModelMeasurements, StepMeasurement, record_measurement
from scheduler.learning.owner_pooling import predict_for_owner
from scheduler.learning.step_time_posterior import MeasuredPlan, Spread
from scheduler.solver.calibration.constant_fit import fit_constants, sample_runs
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.calibration.step_learning import learn_factors, measure_plans
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.catalog import load_gpu
from tests.benchmarks.accuracy import VTRAIN_GUESS, VTRAIN_ROWS
from tests.benchmarks.measured_runs import A100, A800, RUBICK, rubick, vtrain

SEEDS = range(20)
SCATTERED = "vit"
"""The model whose rows scatter: steps of 50 ms, to which odd node counts add 0.3 to 0.5 s. It is stated apart."""
DENSE = tuple(model for model in RUBICK if model != SCATTERED)

Row = tuple[str, str, str]
Rows = tuple[MeasuredPlan, ...]


@dataclass(frozen=True, slots=True)
class LearningErrors:
    """|predicted / measured - 1| of the plans that were not drawn, over all seeds, by model.

    `inside` says which measured times lie in the 80% interval.
    """

    by_scalar: Mapping[str, Floats]
    learned: Mapping[str, Floats]
    inside: Mapping[str, Floats]


@cache
def _rubick(model: str) -> tuple[tuple[MeasuredRun, ...], Rows]:
    runs = tuple(run for _, run in rubick(model))
    return runs, measure_plans(runs, load_gpu(A800))


def learn_rubick(count: int, *, history: bool = False, choose: bool = True) -> LearningErrors:
    """Predict Rubick's placements of each model from `count` rows of it, over SEEDS.

    Args:
        history: whether as many rows of every other model are known, too.
        choose: whether the spread is the most probable one given the drawn rows, not the default.
    """
    found = {
        model: list(
            zip(*(_predict_rubick(model, count, seed, history=history, choose=choose) for seed in SEEDS), strict=True)
        )
        for model in RUBICK
    }
    return LearningErrors(
        *(
            {model: np.concatenate(parts[at]) for model, parts in found.items()}
            for at in range(len(fields(LearningErrors)))
        )
    )


def _predict_rubick(model: str, count: int, seed: int, *, history: bool, choose: bool) -> tuple[Floats, ...]:
    rows: list[MeasuredPlan] = []
    models: list[str] = []
    drawn: list[int] = []
    for name in RUBICK if history else (model,):
        drawn += [len(rows) + number for number in _draw_rows(name, count, seed)]
        rows += _rubick(name)[1]
        models += [name] * len(_rubick(name)[1])
    found = learn_factors(rows, models, drawn, None if choose else Spread())
    others = [number for number, name in enumerate(models) if name == model and number not in drawn]
    measured = np.array([rows[number].log_ratio for number in others])
    scalar = np.mean([rows[number].log_ratio for number in drawn if models[number] == model])
    means, bounds = (
        np.array([found[number].log_mean for number in others]),
        np.log([found[number].interval for number in others]),
    )
    inside = (bounds[:, 0] <= measured) & (measured <= bounds[:, 1])
    return np.abs(np.expm1(scalar - measured)), np.abs(np.expm1(means - measured)), inside.astype(float)


def _draw_rows(model: str, count: int, seed: int) -> tuple[int, ...]:
    return sample_runs(_rubick(model)[0], count, np.random.default_rng(seed))


def learn_vtrain(which: str, count: int, seeds: Sequence[int]) -> tuple[Floats, Floats]:
    """Predict vTrain's runs from `count` of them: mean errors by seed, of a correction for all and after learning.

    Constants are fitted to the drawn runs first, as after a re-solve, and all terms are those under the fitted ones.
    """
    runs, blind = vtrain(which), replace(load_gpu(A100), **VTRAIN_GUESS)
    before = np.array([row.log_ratio for row in measure_plans(runs, blind)])
    by_scalar, learned = [], []
    for seed in seeds:
        drawn = sample_runs(runs, count, np.random.default_rng(seed))
        others = np.setdiff1d(np.arange(len(runs)), drawn)
        by_scalar.append(float(np.abs(np.expm1(before[list(drawn)].mean() - before[others])).mean()))
        rows = measure_plans(runs, fit_constants([runs[number] for number in drawn], blind).hardware)
        found = learn_factors(rows, [run.model for run in runs], drawn)
        errors = [found[number].log_mean - rows[number].log_ratio for number in others]
        learned.append(float(np.abs(np.expm1(errors)).mean()))
    return np.array(by_scalar), np.array(learned)


def time_report(models: int = 100, owners: int = 4) -> float:
    """Return the seconds in which one more report enters the snapshot's measurements and changes a prediction.

    The GPU model has ROWS_MAX measured plans of each of `models` models, of several owners.
    """
    known: Mapping[str, ModelMeasurements] = build_full_state(1, models, owners)
    plan = _rubick("roberta")[1][0].features
    measured: dict[str, dict[str, tuple[StepMeasurement, ...]]] = {}
    for key, each in known.items():
        for row in each.rows:
            plans = measured.setdefault(row.owner, {}).get(key, ())
            measured[row.owner][key] = (*plans, row)
    predict_for_owner(measured, "owner-0", "gpu-0 model-0", plan)
    ratios = iter((1.1, 1.3, 1.5, 1.7, 1.9))

    def report() -> None:
        row = StepMeasurement.from_ratio("job", "owner-0", plan.terms, plan.layout, next(ratios))
        record_measurement(known, "gpu-0 model-0", row, 1.0)
        own = (*measured["owner-0"]["gpu-0 model-0"], row)
        changed = {**measured, "owner-0": {**measured["owner-0"], "gpu-0 model-0": own}}
        predict_for_owner(changed, "owner-0", "gpu-0 model-0", plan)

    return min(_time(report) for _ in range(5))


def build_full_state(gpus: int, models: int, owners: int) -> Mapping[str, ModelMeasurements]:
    """Return the measurements of `models` models on each of `gpus` GPU models, as many rows each as are kept."""
    plans, state = _rubick("roberta")[1], {}
    for gpu, model in product(range(gpus), range(models)):
        known = ModelMeasurements(0.0)
        for number, row in enumerate(plans[:ROWS_MAX]):
            job, owner = f"job-{gpu:02}{model:03}{number:02}", f"owner-{number % owners}"
            known = known.with_row(
                StepMeasurement.from_ratio(
                    job, owner, row.features.terms, row.features.layout, float(np.exp(row.log_ratio))
                ).with_memory(0.87),
                1.0,
            )
        state[f"gpu-{gpu} model-{model}"] = known
    return state


def _time(call: Callable[[], None]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def rows() -> Iterator[Row]:
    """Return (name, target, measured) of each comparison."""
    for count, target in ((7, "12%"), (10, "10.5%")):
        plain = learn_rubick(count)
        yield (
            f"Rubick, {count} rows, without vit, one correction per job",
            "-",
            _format_mean(plain.by_scalar, DENSE),
        )
        yield f"Rubick, {count} rows, without vit, learned", target, _format_mean(plain.learned, DENSE)
        yield f"Rubick, {count} rows, without vit, in the 80% interval", "80%", _format_mean(plain.inside, DENSE)
        yield (
            f"Rubick, {count} rows, vit alone, one correction per job",
            "-",
            _format_mean(plain.by_scalar, [SCATTERED]),
        )
        yield f"Rubick, {count} rows, vit alone, learned", "-", _format_mean(plain.learned, [SCATTERED])
        default = learn_rubick(count, choose=False)
        yield f"Rubick, {count} rows, without vit, default spread", target, _format_mean(default.learned, DENSE)
        shared = learn_rubick(count, history=True)
        yield (
            f"Rubick, {count} rows, without vit, and {count} of each other model",
            target,
            _format_mean(shared.learned, DENSE),
        )
    for which in ("single", "multi"):
        by_scalar, learned = learn_vtrain(which, VTRAIN_ROWS, SEEDS)
        yield f"vTrain {which} node, {VTRAIN_ROWS} rows, one correction", "-", f"{by_scalar.mean():.1%}"
        spread = f"{learned.mean():.1%} ({learned.min():.1%} to {learned.max():.1%})"
        yield f"vTrain {which} node, {VTRAIN_ROWS} rows, constants fitted, learned", "8%", spread
    yield "one report, 100 models on the GPU model, 4 owners", "5 ms", f"{time_report() * 1e3:.1f} ms"
    state_bytes = len(json.dumps(encode_as(Mapping[str, ModelMeasurements], build_full_state(20, 100, 4))))
    yield "measurements of 100 models on 20 GPU models in the snapshot", "5 MB", f"{state_bytes / 1e6:.1f} MB"


def _format_mean(errors: Mapping[str, Floats], models: Sequence[str]) -> str:
    by_model = ", ".join(f"{model} {errors[model].mean():.1%}" for model in models)
    return f"{np.concatenate([errors[model] for model in models]).mean():.1%} ({by_model})"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row), flush=True)
