"""Frozen layers whose outputs the trainer caches, as PipeTransformer (ICML'21, section 3.4) does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import build_layer_chain
from scheduler.solver.costs.layer_time import LayerTimes, compute_layer_times
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.profiles.catalog import ProfileError, load_gpu, load_model, parse_model
from scheduler.solver.profiles.model_profile import LayerProfile, ModelProfile
from tests.benchmarks.freezing import LARGE_BERT, compute_speedup, computed, first_passes, later_passes
from tests.simulation.test_freezing import ARCHITECTURE, PROFILE

T4 = load_gpu("t4")
GPT2 = replace(load_model("gpt2"), cache_frozen_layers=True)


def test_published_schedule_reaches_twice_the_speed_with_a_cache() -> None:
    """Without it the forward pass of frozen layers remains, so that the flops allow at most 1.8."""
    assert 1.6 < compute_speedup(computed()) < 1.8
    assert 2.0 <= compute_speedup(first_passes()) <= compute_speedup(later_passes()) <= 2.8


def times_of_layer(model: ModelProfile, number: int, strategy: LayerStrategy, batch: int = 8) -> LayerTimes:
    kinds = (build_layer_chain(model, T4.precision, stages=1)[number],)
    setting = StageSetting.for_stage(T4, node_gpus=8, gpus=strategy.gpus, global_batch=batch)
    chosen = StrategyCandidates.from_strategies([strategy], micro_batches=1, batch=batch)
    return compute_layer_times(kinds, chosen, setting)


@pytest.mark.parametrize(
    "strategy",
    [
        LayerStrategy(layers=1, dp=8),
        LayerStrategy(layers=1, dp=8, zero=3, shard_group=8),
        LayerStrategy(layers=1, tp=2, dp=4),
        LayerStrategy(layers=1, ulysses=2, dp=4),
        LayerStrategy(layers=1, ring=2, dp=4, zero=3, shard_group=8),
    ],
)
def test_cached_layers_cost_nothing_but_the_read_of_the_last_one(strategy: LayerStrategy) -> None:
    model = GPT2.with_frozen_layers(4)
    for number in range(3):
        assert float(times_of_layer(model, number, strategy).total_s[0, 0]) == 0.0
    last, samples = model.layers[0], 8 / strategy.dp / (strategy.ulysses * strategy.ring)
    scale = T4.precision.value_bytes / 2
    read_s = last.boundary_bytes_per_sample * scale * samples / T4.host_bandwidth_bytes_per_s
    assert float(times_of_layer(model, 3, strategy).total_s[0, 0]) == pytest.approx(read_s)


def test_first_pass_after_a_freeze_computes_and_stores_the_newly_frozen_layers() -> None:
    strategy = LayerStrategy(layers=1, dp=8)
    model = GPT2.with_frozen_layers(4).with_cached_layers(2)
    plain = replace(GPT2, cache_frozen_layers=False).with_frozen_layers(4)
    stored_s = float(times_of_layer(model, 3, strategy).total_s[0, 0])
    computed_s = float(times_of_layer(plain, 3, strategy).total_s[0, 0])
    read_s = float(times_of_layer(model, 1, strategy).total_s[0, 0])
    assert read_s > 0
    assert stored_s == pytest.approx(computed_s + read_s)


def test_useful_work_leaves_out_cached_layers() -> None:
    assert GPT2.with_frozen_layers(12).training_flops_per_sample == pytest.approx(2 * GPT2.head.flops_per_sample)


def test_profile_says_whether_the_trainer_caches() -> None:
    document = PROFILE | {"cache_frozen_layers": True, "architecture": {**ARCHITECTURE, "frozen_layers": 5}}
    model = parse_model(json.dumps(document))
    assert (model.frozen_layer_count, model.cached_layer_count) == (5, 5)
    assert model.with_frozen_layers(7).cached_layer_count == 7
    assert LARGE_BERT.with_frozen_layers(7).cached_layer_count == 0


def test_only_frozen_layers_at_the_front_are_cached() -> None:
    message = "model 'gpt2': cached_layers is 5; it must be from 0 to the number of frozen layers at the front, 4"
    with pytest.raises(ProfileError, match=message):
        GPT2.with_frozen_layers(4).with_cached_layers(5)
    with pytest.raises(ProfileError, match="cached is true; it must be false for a layer that is not frozen"):
        replace(GPT2.layers[0], cached=True)
    runs: tuple[LayerProfile, ...] = GPT2.with_frozen_layers(4).layers
    with pytest.raises(ProfileError, match=r"layers\[1\] is cached; all layers before it must be too"):
        replace(GPT2, layers=(replace(runs[0], cached=False), runs[0]))


def test_text_in_place_of_the_flag_is_rejected() -> None:
    with pytest.raises(ProfileError, match="cache_frozen_layers"):
        parse_model(json.dumps(PROFILE | {"cache_frozen_layers": "yes"}))
