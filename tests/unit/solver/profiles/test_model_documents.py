"""Model profiles as users write them, and their validation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.solver.profiles.catalog import ProfileError, parse_model
from scheduler.solver.profiles.model_profile import LayerProfile
from tests.builders_solver import LAYER

DECODER = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 512, "vocabulary": 256, "sequence_length": 128}
VISION = {"family": "vision", "layers": 4, "hidden": 128, "heads": 4, "ffn": 512,
          "image_size": 32, "patch_size": 8, "channels": 3, "classes": 10}  # fmt: skip


def _architecture(**change: object) -> str:
    return json.dumps({"name": "net", "architecture": DECODER | change})


def _layers(*changes: dict[str, Any]) -> str:
    layers = [LAYER | change for change in changes or ({},)]
    return json.dumps({"name": "net", "sequence_length": 64, "layers": layers, "head": {"parameters": 7}})


def test_figure_can_have_unit_and_source() -> None:
    told = {"value": 128, "unit": "values", "source": "a choice"}
    assert parse_model(_architecture(hidden=told)) == parse_model(_architecture())


def test_document_can_have_one_source() -> None:
    sourced = json.dumps({"name": "net", "source": "a choice", "architecture": DECODER})
    assert parse_model(sourced) == parse_model(_architecture())


def test_default_family_is_decoder_with_full_key_heads() -> None:
    assert parse_model(_architecture(family="decoder", kv_heads=4, head_dim=32)) == parse_model(_architecture())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -3, 1.5, 10**400, 1e200, "many", True, None])
@pytest.mark.parametrize("field", ["layers", "hidden", "kv_heads", "vocabulary", "sequence_length"])
def test_invalid_size_is_rejected_by_name(field: str, value: object) -> None:
    with pytest.raises(ProfileError, match=f"architecture of 'net': {field} is"):
        parse_model(_architecture(**{field: value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7}, "heads is 7; it must divide hidden, which is 128, or head_dim must be given"),
        ({"kv_heads": 3}, r"kv_heads is 3; it must divide heads \(4\)"),
        ({"hidden": 1.5}, "hidden is 1.5; it must be a whole number"),
        ({"gated_mlp": 1}, "gated_mlp is 1; it must be true or false"),
        ({"width": 3}, "field 'width' is unknown; allowed are"),
        (
            {"family": "recurrent"},
            "family is 'recurrent'; allowed are decoder, encoder, encoder-decoder, vision, diffusion",
        ),
        ({"hidden": {"value": 1, "unit": "bytes"}}, "hidden is in 'bytes'; it must be in 'values'"),
        ({"experts": 8}, r"experts_per_token is 0; it must be from 1 to experts \(8\)"),
        ({"experts": 2, "experts_per_token": 3}, r"experts_per_token is 3; it must be from 1 to experts \(2\)"),
        ({"experts_per_token": 2}, "experts_per_token is 2; it must be absent without experts"),
        ({"frozen_layers": 5}, "frozen_layers is 5; it must be at most 4, the layers there are"),
        ({"frozen_layers": -1}, "frozen_layers is -1; it must be a finite number, 0 or above"),
        ({"layers": 10**9}, "layers is 1000000000; it must be at most 512"),
        ({"classes": 2}, "field 'classes' is unknown"),
        ({"decoder_layers": 2}, "field 'decoder_layers' is unknown"),
        ({"family": "encoder-decoder"}, "field 'decoder_layers' is missing"),
        ({"family": "encoder", "classes": 2, "tied_embedding": True}, "tied_embedding is true; it must be false with"),
        ({"family": "vision"}, "field 'channels' is missing"),
    ],
)
def test_inconsistent_architecture_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_model(_architecture(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 7}, "patch_size is 7; it must divide image_size, which is 32"),
        ({"patch_size": 0}, "patch_size is 0; it must be a finite number above 0"),
        ({"vocabulary": 9}, "field 'vocabulary' is unknown"),
        ({"sequence_length": 9}, "field 'sequence_length' is unknown"),
    ],
)
def test_inconsistent_vision_model_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_model(json.dumps({"name": "net", "architecture": VISION | change}))


def test_list_of_layers_is_parsed() -> None:
    model = parse_model(_layers())
    assert (model.layer_count, model.parameters, model.layers[0].heads) == (2, 2007, 8)


def test_layer_accepts_every_profile_figure() -> None:
    told: dict[str, Any] = {
        "attention_flops_per_sample": 1e8,
        "traffic_bytes_per_sample": 9000,
        "selective_bytes_per_sample": 300,
        "tokens_per_sample": 64,
        "attention_heads": 16,
        "head_width": 128,
        "tensor_messages": 3,
        "expert_parameters": 800,
        "experts": 4,
        "experts_per_token": 2,
        "frozen": True,
        "cached": True,
        "forward_s_per_sample": {"2": 0.0025, "1": 0.004},
    }
    expected = LAYER | told | {"forward_s_per_sample": ((1, 0.004), (2, 0.0025))}
    assert set(expected) == set(LayerProfile.__dataclass_fields__)
    assert parse_model(_layers(told)).layers[0] == LayerProfile(**expected)


def test_list_of_layers_cannot_change_its_sequence_length() -> None:
    assert parse_model(_layers(), 64) == parse_model(_layers())
    with pytest.raises(ProfileError, match="sequence_length is 128; the layers of 'net' are given only for 64"):
        parse_model(_layers(), 128)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3])
@pytest.mark.parametrize(
    "field", sorted(set(LayerProfile.__dataclass_fields__) - {"frozen", "cached", "forward_s_per_sample"})
)
def test_invalid_layer_figure_is_rejected_by_name(field: str, value: float) -> None:
    with pytest.raises(ProfileError, match=rf"layers\[1\]: (layer profile: )?{field} is {value}; it must be"):
        parse_model(_layers({}, {field: value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": 0}, r"layers\[0\]: layer profile: parameters is 0; it must be a finite number above 0"),
        ({"expert_parameters": 1001, "experts": 2, "experts_per_token": 1},
         "expert_parameters is 1001; it must be at most parameters, which is 1000"),
        ({"expert_parameters": 9}, "expert_parameters is 9; it must be 0 without experts"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token is 3; it must be at most experts, which is 2"),
        ({"experts": 2}, r"experts_per_token is 0; it must be from 1 to experts \(2\)"),
        ({"selective_bytes_per_sample": 4001}, "selective_bytes_per_sample is 4001; it must be at most activation_by"),
        ({"frozen": "yes"}, "frozen is 'yes'; it must be true or false"),
        ({"color": 1}, "field 'color' is unknown"),
        ({"forward_s_per_sample": {"2": 0.1}}, "forward_s_per_sample has degrees 2; it must include degree 1"),
        ({"forward_s_per_sample": {"1": 0}}, "forward_s_per_sample: degree 1 is 0; it must be a finite number above 0"),
        ({"flops_per_sample": 1e308}, "flops_per_sample is 1e.308; it must be a finite number, 0 or from 1e-24 to"),
        ({"parameters": 2**43 + 1}, "parameters is 8796093022209; it must be a whole number of at most 8796093022208"),
        ({"forward_s_per_sample": {"1": float("nan")}}, "forward_s_per_sample: 1 is nan; it must be a finite number"),
        ({"forward_s_per_sample": {"0": 1, "1": 1}}, "degree is 0; it must be a finite number above 0"),
        ({"forward_s_per_sample": {"two": 1}}, "degree is 'two'; it must be a whole number above 0"),
        ({"forward_s_per_sample": {"1": 1, "01": 1}}, "has degrees 1, 1;"),
        ({"forward_s_per_sample": [1]}, "it must be a JSON object"),
    ],
)  # fmt: skip
def test_inconsistent_layer_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_model(_layers(change))


def test_all_layers_need_the_same_measured_degrees() -> None:
    one, both = {"forward_s_per_sample": {"1": 0.1}}, {"forward_s_per_sample": {"1": 0.1, "2": 0.05}}
    assert parse_model(_layers(both, both)).layers[1].measured_degrees == (1, 2)
    with pytest.raises(ProfileError, match=r"layers\[1\]: forward_s_per_sample has degrees 1; it must have those of"):
        parse_model(_layers(both, one))
    with pytest.raises(ProfileError, match=r"layers\[1\]: forward_s_per_sample has degrees none; it must have those"):
        parse_model(_layers(both, {}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "it must be a JSON object"),
        ('{"name": "x"}', "field 'layers' is missing"),
        ('{"name": "x", "architecture": 3}', "it must be a JSON object"),
        ('{"name": "x", "architecture": {}, "layers": []}', "field 'layers' is unknown"),
        ('{"name": "x", "sequence_length": 8, "layers": []}', "layers is empty"),
        ('{"name": "x", "sequence_length": 8, "layers": {}}', "must be a list"),
        ('{"name": "x", "sequence_length": 8, "layers": [3]}', r"layers\[0\] is 3; it must be a JSON object"),
    ],
)
def test_malformed_model_profile_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_model(text)
