"""Costs of sequences from our own profiles, against the published constants of the same kind of model."""

from __future__ import annotations

from functools import partial

import pytest

from scheduler.solver.lengths.batch_search import search_batch_plan
from scheduler.solver.lengths.derived_costs import DerivedCosts, derive_costs
from scheduler.solver.lengths.sequence_costs import FLEXSP_GPT_7B_A100
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.request import DeviceGroup


def derive(model: str = "llama-2-7b", *, gpus: int = 64) -> DerivedCosts:
    hardware = load_gpu("a100-80g")
    group = DeviceGroup(hardware, gpus, min(8, gpus), min(8, gpus), hardware.memory_bytes)
    return derive_costs(partial(load_model, model), group, context=64 * 1024, zero=3)


def test_compute_times_and_memory_are_those_that_flexsp_measured() -> None:
    costs, published = derive().sequences, FLEXSP_GPT_7B_A100
    assert costs.quadratic_s == pytest.approx(published.quadratic_s, rel=0.1)
    assert costs.linear_s == pytest.approx(published.linear_s, rel=0.1)
    assert costs.gpu_tokens_max == pytest.approx(published.gpu_tokens_max, rel=0.3)


def test_exchanges_cost_most_across_nodes_and_degrees_divide_the_heads() -> None:
    costs = derive().sequences
    exchange_s = dict(costs.exchange_s)
    assert costs.degrees == (1, 2, 4, 8, 16, 32)
    assert exchange_s[16] > 5 * exchange_s[8] > 0


def test_derived_costs_plan_a_batch() -> None:
    plan = search_batch_plan(derive(gpus=16).sequences, [60_000, *[1_000] * 60])
    assert plan.optimality_gap < 0.1


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="gpus is 1; the weights of the model do not fit on so few a100-80g"):
        derive(gpus=1)
