"""Memory and traffic of the optimizer's state, by optimizer."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import build_layer_chain
from scheduler.solver.costs.layer_memory import compute_state_bytes
from scheduler.solver.costs.layer_time import compute_layer_times
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.profiles.catalog import ProfileError, load_gpu, load_model, parse_model
from scheduler.solver.profiles.model_profile import ModelProfile, TrainingOptimizer

A100, GPT2 = load_gpu("a100-80g"), load_model("gpt2")
ADAMW, SGD, MUON = TrainingOptimizer.ADAMW, TrainingOptimizer.SGD, TrainingOptimizer.MUON
PLAIN_SGD, ADAFACTOR = TrainingOptimizer.PLAIN_SGD, TrainingOptimizer.ADAFACTOR


def _costs(model: ModelProfile, strategy: LayerStrategy) -> tuple[int, float]:
    """Return bytes of state and seconds of the optimizer step, over all layers of one stage."""
    layers = build_layer_chain(model, A100.precision, stages=1)
    setting = StageSetting.for_stage(A100, node_gpus=8, gpus=strategy.gpus, global_batch=8)
    chosen = StrategyCandidates.from_strategies([strategy], micro_batches=1, batch=8)
    state = compute_state_bytes(layers.kinds, chosen, setting)
    times = compute_layer_times(layers.kinds, chosen, setting)
    return int(state[layers.types].sum()), float(np.sum(times.other_s[layers.types]))


@pytest.mark.parametrize(
    "strategy", [LayerStrategy(1, dp=1), LayerStrategy(1, dp=8, zero=3, shard_group=8)], ids=["dp1", "zero3"]
)
def test_one_moment_less_takes_four_bytes_less_of_each_weight_on_a_gpu(strategy: LayerStrategy) -> None:
    untied = replace(GPT2, tied_embedding=False)
    held, step_s = _costs(untied, strategy)
    with_sgd, sgd_step_s = _costs(replace(untied, optimizer=SGD), strategy)
    with_muon, muon_step_s = _costs(replace(untied, optimizer=MUON), strategy)
    ends = untied.embedding.parameters + untied.head.parameters
    shards = strategy.dp
    assert held - with_sgd == pytest.approx(4 * untied.parameters / shards, rel=1e-6)
    assert held - with_muon == pytest.approx(4 * (untied.parameters - ends) / shards, rel=1e-6)
    assert sgd_step_s < muon_step_s < step_s
    without_moments, plain_step_s = _costs(replace(untied, optimizer=PLAIN_SGD), strategy)
    factored, factored_step_s = _costs(replace(untied, optimizer=ADAFACTOR), strategy)
    assert with_sgd - without_moments == pytest.approx(4 * untied.parameters / shards, rel=1e-6)
    assert factored - without_moments == pytest.approx(0.01 * untied.parameters / shards, rel=1e-4)
    assert plain_step_s < factored_step_s < sgd_step_s


def test_trained_head_of_a_frozen_model_keeps_its_moments() -> None:
    frozen = replace(GPT2, tied_embedding=False).with_frozen_layers(12)
    strategy = LayerStrategy(1, dp=1)
    held, with_muon, with_sgd = (_costs(replace(frozen, optimizer=each), strategy)[0] for each in (ADAMW, MUON, SGD))
    assert held == with_muon == with_sgd + 4 * frozen.head.parameters


def test_optimizer_of_a_profile_is_read_and_checked() -> None:
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 128, "vocabulary": 256, "sequence_length": 64}
    document = {"name": "mine", "architecture": sizes}
    assert parse_model(json.dumps(document)).optimizer is ADAMW
    for each in TrainingOptimizer:
        assert parse_model(json.dumps(document | {"optimizer": each.value})).optimizer is each
    with pytest.raises(ProfileError, match="optimizer is 'lion'; allowed are adamw, sgd, plain-sgd, muon, adafactor"):
        parse_model(json.dumps(document | {"optimizer": "lion"}))
