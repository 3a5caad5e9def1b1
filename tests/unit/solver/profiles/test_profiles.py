"""The shipped profiles, and what the reader refuses."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from scheduler.solver.profiles.shipped import (
    Dimension,
    Precision,
    ProfileError,
    gpu_names,
    load_gpu,
    load_model,
    model_names,
    parse_gpu,
    parse_model,
)


def _document(folder: str, name: str) -> dict[str, Any]:
    text = files("scheduler.solver.profiles").joinpath("data", folder, f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _layers_document() -> dict[str, Any]:
    layer = {
        "layers": 2,
        "flops_per_sample": 1e9,
        "parameters": 1000,
        "activation_bytes_per_sample": 4000,
        "replicated_activation_bytes_per_sample": 0,
        "boundary_bytes_per_sample": 500,
        "heads": 8,
    }
    return {"name": "net", "sequence_length": 64, "layers": [layer], "head": {"parameters": 7}}


def test_every_shipped_profile_loads() -> None:
    assert {"a100-80g", "h100-80g", "cpu"} <= set(gpu_names())
    assert {"gpt2", "llama-2-7b", "tiny-gpt"} <= set(model_names())
    assert all(load_gpu(name).gpu == name for name in gpu_names())
    assert all(load_model(name).name == name for name in model_names())


def test_every_shipped_figure_has_a_unit_and_a_source() -> None:
    figures = [entry for name in gpu_names() for field, entry in _document("gpus", name).items() if field != "gpu"] + [
        entry for name in model_names() for entry in _document("models", name)["architecture"].values()
    ]
    assert all(set(entry) == {"value", "unit", "source"} and entry["source"] for entry in figures)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-2-7b", 6_738_415_616), ("gpt2", 124_439_808), ("tiny-gpt", 875_264)],
)
def test_parameter_counts_are_within_a_ten_thousandth_of_the_real_ones(name: str, parameters: int) -> None:
    assert load_model(name).parameters == pytest.approx(parameters, rel=1e-4)


def test_a_training_step_of_llama_costs_six_flops_a_weight_and_token_plus_attention() -> None:
    model = load_model("llama-2-7b", 4096)
    per_token = 3 * model.flops_per_sample / 4096
    attention = 12 * 32 * 4096 * 4096
    assert per_token == pytest.approx(6 * (model.parameters - model.embedding.parameters) + attention, rel=1e-3)


def test_a_sequence_length_rescales_an_architecture_and_zero_keeps_its_own() -> None:
    assert load_model("llama-2-7b") == load_model("llama-2-7b", 4096)
    short = load_model("llama-2-7b", 2048)
    assert short.sequence_length == 2048
    assert short.layers[0].boundary_bytes_per_sample * 2 == load_model("llama-2-7b").layers[0].boundary_bytes_per_sample


def test_the_cpu_worker_spreads_over_data_alone_and_trains_in_fp32() -> None:
    cpu = load_gpu("cpu")
    assert cpu.dimensions == {Dimension.DATA, Dimension.FSDP, Dimension.RECOMPUTE}
    assert cpu.precision is Precision.FP32


def test_a_list_of_layers_is_read_as_it_stands() -> None:
    model = parse_model(json.dumps(_layers_document()))
    assert (model.layer_count, model.parameters, model.layers[0].heads) == (2, 2007, 8)


def test_a_list_of_layers_cannot_be_rescaled_to_another_sequence_length() -> None:
    text = json.dumps(_layers_document())
    assert parse_model(text, 64) == parse_model(text)
    with pytest.raises(ProfileError, match="sequence_length is 128; the layers of 'net' are given for 64 alone"):
        parse_model(text, 128)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"gpu is 'b9000'; allowed are a100-80g, cpu, h100-80g"):
        load_gpu("b9000")
    with pytest.raises(ProfileError, match=r"model is '../gpt2'; allowed are gpt2, llama-2-7b, tiny-gpt"):
        load_model("../gpt2")
    with pytest.raises(ProfileError, match="sequence_length is -1"):
        load_model("gpt2", -1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1.0, "fast", True, None])
@pytest.mark.parametrize(
    "field", ["peak_flops_per_s", "intra_bandwidth_bytes_per_s", "inter_latency_s", "memory_bytes"]
)
def test_a_gpu_figure_that_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    document = _document("gpus", "a100-80g") | {field: value}
    with pytest.raises(ProfileError, match=field):
        parse_gpu(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_flops_per_s": {"value": 312, "unit": "Tflop/s"}}, "peak_flops_per_s is in 'Tflop/s'; it must be in"),
        ({"efficiency": 1.5}, "efficiency is 1.5; it must be at most 1"),
        ({"overlap_coefficient": 0.9}, "overlap_coefficient is 0.9; it must be at least 1"),
        ({"precision": "fp8"}, "precision is 'fp8'; allowed are bf16, fp32"),
        ({"dimensions": ["data", "magic"]}, "dimensions is"),
        ({"dimensions": ["fsdp"]}, "dimensions must contain 'data'"),
        ({"colour": "green"}, "field 'colour' is unknown"),
    ],
)
def test_a_contradictory_gpu_profile_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_gpu(json.dumps(_document("gpus", "a100-80g") | change))


@pytest.mark.parametrize("field", ["flops_per_sample", "parameters", "boundary_bytes_per_sample", "layers"])
@pytest.mark.parametrize("value", [float("nan"), 0, -3])
def test_a_layer_figure_that_cannot_be_is_refused_by_name(field: str, value: float) -> None:
    document = _layers_document()
    document["layers"][0][field] = value
    with pytest.raises(ProfileError, match=field):
        parse_model(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7}, "heads is 7; it must divide hidden, which is 128"),
        ({"kv_heads": 3}, r"kv_heads is 3; it must divide heads \(4\)"),
        ({"hidden": 1.5}, "hidden is 1.5; it must be a whole number"),
        ({"gated_mlp": 1}, "gated_mlp is 1; it must be true or false"),
        ({"width": 3}, "field 'width' is unknown"),
    ],
)
def test_a_contradictory_architecture_is_refused(change: dict[str, object], message: str) -> None:
    document = _document("models", "tiny-gpt")
    document["architecture"] |= change
    with pytest.raises(ProfileError, match=message):
        parse_model(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object is needed"),
        ('{"name": "x"}', "field 'layers' is missing"),
        ('{"name": "x", "architecture": 3}', "a JSON object is needed"),
        ('{"name": "x", "sequence_length": 8, "layers": []}', "layers is empty"),
        ('{"name": "x", "sequence_length": 8, "layers": {}}', "must be a list"),
    ],
)
def test_a_malformed_model_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_model(text)
