"""The shipped model profiles: names, sources, and the totals that their authors publish."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from scheduler.solver.profiles.catalog import ProfileError, list_model_names, load_model
from scheduler.solver.profiles.hugging_face import translate_configuration
from scheduler.trainer.model import SIZES, build_meta_gpt

PUBLISHED_PARAMETERS = {
    "gpt2": 124_439_808,
    "bert-large": 335_174_458,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "baichuan2-13b": 13_896_668_160,
    "codeqwen1.5-7b": 7_250_284_544,
    "mixtral-8x7b": 46_702_792_704,
    "t5-large": 737_668_096,
    "vit-huge": 632_045_800,
}
DENOISERS = {"flux.1-dev": 11.9e9, "sd3-medium": 2.03e9}
CONFIGURATIONS: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "data" / "hugging_face_configurations.json").read_text()
)
TRANSLATED = sorted(CONFIGURATIONS.keys() & set(list_model_names()) - PUBLISHED_PARAMETERS.keys())
"""Models that are shipped as their configuration translates."""
ACTIVE_PARAMETERS = {"mixtral-8x7b": 12.88e9}


def _document(name: str) -> dict[str, Any]:
    text = files("scheduler.solver.profiles").joinpath("data", "models", f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def test_shipped_models_load_by_name() -> None:
    assert {*PUBLISHED_PARAMETERS, *SIZES, *TRANSLATED, *DENOISERS} == set(list_model_names())
    assert all(load_model(name).name == name for name in list_model_names())


@pytest.mark.parametrize("name", list_model_names())
def test_every_shipped_figure_has_a_source(name: str) -> None:
    document = _document(name)
    figures = document["architecture"].values()
    own = [entry for entry in figures if isinstance(entry, dict) and "value" in entry]
    assert all(set(entry) == {"value", "unit", "source"} and entry["source"] for entry in own)
    assert len(own) == len(figures) or document["source"]


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items())
def test_parameters_match_the_published_ones(name: str, parameters: int) -> None:
    # BERT's head is tied, and a tied head's own dense layer is not counted.
    assert load_model(name).parameters == pytest.approx(parameters, rel=4e-3 if name == "bert-large" else 2e-5)


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_shipped_architecture_is_that_of_the_released_configuration(name: str) -> None:
    assert (
        translate_configuration(CONFIGURATIONS[name]["configuration"])["architecture"]
        == (_document(name)["architecture"])
    )


@pytest.mark.parametrize(("name", "parameters"), DENOISERS.items())
def test_denoisers_have_about_the_published_parameters(name: str, parameters: float) -> None:
    # The last layer of SD3 has no weights for text behind its attention.
    assert load_model(name).parameters == pytest.approx(parameters, rel=0.015)


@pytest.mark.parametrize("name", SIZES)
def test_trainer_models_have_the_parameters_of_their_profiles(name: str) -> None:
    torch = pytest.importorskip("torch")
    built = sum(weight.numel() for weight in build_meta_gpt(SIZES[name], dtype=torch.float32).parameters())
    model = load_model(name)
    assert model.parameters == built
    assert model.sequence_length == SIZES[name].sequence


@pytest.mark.parametrize("name", SIZES)
def test_a_frozen_layer_is_a_frozen_block_of_the_trainer(name: str) -> None:
    """Both count the embedding with the first layer, and never the head."""
    torch = pytest.importorskip("torch")
    parameters = dict(build_meta_gpt(SIZES[name], dtype=torch.float32).named_parameters())
    for blocks in range(SIZES[name].layers + 1):
        fronts = ("embedding.", *(f"blocks.{block}." for block in range(blocks))) if blocks else ()
        built = sum(weight.numel() for key, weight in parameters.items() if key.startswith(fronts))
        model = load_model(name).with_frozen_layers(blocks)
        frozen = sum(run.layers * run.parameters for run in model.layers if run.frozen)
        assert frozen + (model.embedding.parameters if blocks else 0) == built
    assert model.layer_count == SIZES[name].layers


@pytest.mark.parametrize("name", sorted(set(PUBLISHED_PARAMETERS) - {"t5-large", "vit-huge"}))
def test_a_forward_pass_costs_two_flops_a_weight_in_use_and_token_plus_attention(name: str) -> None:
    model = load_model(name)
    run, tokens = model.layers[0], model.sequence_length
    used = ACTIVE_PARAMETERS.get(name, model.parameters)
    # A table is looked up, not multiplied. A tied table is multiplied in the head.
    tables = model.embedding.parameters - (model.head.parameters if model.tied_embedding else 0)
    attention = run.layers * run.attention_flops_per_sample
    assert model.flops_per_sample == pytest.approx(2 * tokens * (used - tables) + attention, rel=0.01)


def test_vit_huge_flops_match_the_published_ones() -> None:
    # torchvision lists 167.295 GFLOPS (multiply-adds) for ViT_H_14 at 224 pixels, products of attention included.
    assert load_model("vit-huge").flops_per_sample == pytest.approx(2 * 167.295e9, rel=0.01)


def test_mixtral_flops_count_two_of_eight_experts() -> None:
    run = load_model("mixtral-8x7b").layers[0]
    assert (run.experts, run.experts_per_token, run.heads, run.attention_heads) == (8, 2, 8, 32)
    assert run.expert_parameters == 8 * 3 * 4096 * 14336
    used = run.parameters - run.expert_parameters * 6 // 8
    assert run.flops_per_sample == pytest.approx(2 * 32768 * used, rel=1e-3)


def test_t5_is_two_runs_and_cross_attention_makes_its_decoder_layers_larger() -> None:
    encoder, decoder = load_model("t5-large").layers
    assert (encoder.layers, decoder.layers) == (24, 24)
    assert decoder.parameters - encoder.parameters == 4 * 1024 * 1024 + 1024
    assert (encoder.tokens_per_sample, decoder.tokens_per_sample) == (512, 114)
    assert encoder.boundary_bytes_per_sample == decoder.boundary_bytes_per_sample == 2 * (512 + 114) * 1024


def test_heads_bound_the_degrees_tensor_by_keys_and_ulysses_by_queries() -> None:
    degrees = {name: (load_model(name).layers[0].heads, load_model(name).layers[0].attention_heads) for name in
               ("gpt2", "llama-2-70b", "llama-3-8b", "codeqwen1.5-7b", "t5-large", "vit-huge")}  # fmt: skip
    assert degrees == {
        "gpt2": (12, 12),
        "llama-2-70b": (8, 64),
        "llama-3-8b": (8, 32),
        "codeqwen1.5-7b": (4, 32),
        "t5-large": (16, 16),
        "vit-huge": (16, 16),
    }


def test_a_sequence_length_rescales_an_architecture_and_zero_keeps_its_own() -> None:
    assert load_model("llama-2-7b") == load_model("llama-2-7b", 4096)
    short = load_model("llama-2-7b", 2048)
    assert short.sequence_length == 2048
    assert short.layers[0].boundary_bytes_per_sample * 2 == load_model("llama-2-7b").layers[0].boundary_bytes_per_sample


def test_a_position_table_grows_with_the_sequence_but_does_not_shrink() -> None:
    assert load_model("bert-large", 128).parameters == load_model("bert-large").parameters
    assert load_model("bert-large", 1024).parameters - load_model("bert-large").parameters == 512 * 1024


def test_the_targets_of_t5_grow_with_its_inputs() -> None:
    assert load_model("t5-large", 1024).layers[1].tokens_per_sample == 228


def test_images_have_the_tokens_that_their_patches_give() -> None:
    assert load_model("vit-huge", 257) == load_model("vit-huge")
    with pytest.raises(ProfileError, match="sequence_length is 512; images of 224 pixels in patches of 14 give 257"):
        load_model("vit-huge", 512)


def test_unknown_model_is_rejected_with_the_known_names() -> None:
    with pytest.raises(ProfileError, match=r"model is '../gpt2'; allowed are baichuan2-13b, bert-large, .*vit-huge"):
        load_model("../gpt2")
    with pytest.raises(ProfileError, match="sequence_length is -1"):
        load_model("gpt2", -1)
