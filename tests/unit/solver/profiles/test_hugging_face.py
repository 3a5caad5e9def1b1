"""Configurations of Hugging Face models: totals that others count, layers that differ, and what is refused.

`hugging_face_configurations.json` holds the sizes of released configurations, and the parameters that transformers
5.24 counts in a model built from each.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from scheduler.solver.profiles.catalog import ProfileError, load_model, parse_model
from scheduler.solver.profiles.model_profile import ModelProfile

RELEASED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "data" / "hugging_face_configurations.json").read_text()
)
FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "attention_head_dim": 128,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
}
DIT = {
    "_class_name": "DiTTransformer2DModel",
    "attention_head_dim": 72,
    "in_channels": 4,
    "num_attention_heads": 16,
    "num_layers": 28,
    "patch_size": 2,
    "sample_size": 32,
}


def read(name: str, sequence_length: int = 0, **changes: Any) -> ModelProfile:
    return parse_model(json.dumps(RELEASED[name]["configuration"] | changes), sequence_length)


@pytest.mark.parametrize("name", RELEASED)
def test_a_configuration_has_the_parameters_that_its_library_builds(name: str) -> None:
    # A tied head's own dense layer (BERT) is not counted, nor biases of gpt-oss' experts.
    tolerance = 4e-3 if name in ("bert-large", "roberta-large") else 5e-4
    assert read(name).parameters == pytest.approx(RELEASED[name]["parameters"], rel=tolerance)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x22b", 39e9),
        ("qwen3-30b-a3b", 3.3e9),
        ("qwen3-235b-a22b", 22e9),
        ("deepseek-v2-lite", 2.4e9),
        ("deepseek-v3", 37e9),
        ("gpt-oss-20b", 3.6e9),
        ("gpt-oss-120b", 5.1e9),
        ("llama-4-scout", 17e9),
    ],
)
def test_a_token_passes_the_parameters_that_the_authors_call_active(name: str, active: float) -> None:
    model = read(name, 1024)
    products = sum(run.layers * run.flops_per_sample for run in model.layers) + model.head.flops_per_sample
    # Some authors leave the table of tokens out.
    table = 0 if name in ("gpt-oss-20b", "gpt-oss-120b", "deepseek-v2-lite") else model.embedding.parameters
    assert products / 2 / 1024 + table == pytest.approx(active, rel=0.06)


@pytest.mark.parametrize(("name", "length"), [("llama-3.1-8b", 8192), ("olmo-2-7b", 4096), ("whisper-large-v3", 1500)])
def test_a_length_is_what_positions_allow_up_to_8192(name: str, length: int) -> None:
    assert read(name).sequence_length == length


def test_a_stated_length_may_be_longer() -> None:
    assert read("llama-3.1-8b", 65_536).sequence_length == 65_536


def test_windows_cut_the_attention_of_the_layers_that_have_one() -> None:
    local, other = read("gemma-3-27b", 8192).layers[:2]
    assert (local.layers, other.layers) == (5, 1)
    assert local.attention_flops_per_sample / other.attention_flops_per_sample == pytest.approx(
        (1024 * (8192 - 512)) / (8192 * 4096)
    )


def test_layers_are_alike_while_no_sample_is_longer_than_the_window() -> None:
    assert [run.layers for run in read("gemma-3-27b", 1024).layers] == [62]
    assert [run.layers for run in read("gemma-2-9b", 4096).layers] == [42]


def test_listed_layer_types_are_those_that_a_type_has_by_default() -> None:
    assert "layer_types" in RELEASED["gpt-oss-20b"]["configuration"]
    assert read("gpt-oss-20b", layer_types=None) == read("gpt-oss-20b")


def test_layers_without_experts_are_runs_of_their_own() -> None:
    assert [(run.layers, run.experts) for run in read("deepseek-v3").layers] == [(3, 0), (58, 256)]
    sparse = read("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[1])
    assert [(run.layers, run.experts) for run in sparse.layers][:2] == [(3, 0), (1, 128)]


def test_a_window_of_qwen_counts_only_with_its_flag() -> None:
    window = {"sliding_window": 1024, "max_window_layers": 20}
    assert len(read("qwen2-7b", **window).layers) == 1
    assert [run.layers for run in read("qwen2-7b", use_sliding_window=True, **window).layers] == [20, 8]


def test_compressed_keys_and_values_make_a_smaller_layer_than_whole_ones() -> None:
    compressed = read("deepseek-v3").layers[0]
    whole = read("deepseek-v3", kv_lora_rank=None, head_dim=192).layers[0]
    projections = 7168 * 1536 + 1536 * 24_576 + 7168 * 576 + 512 * 128 * 256 + 16_384 * 7168
    assert whole.parameters - compressed.parameters == 4 * 7168 * 24_576 - projections - 1536 - 512


def test_a_head_of_classes_replaces_the_tied_one() -> None:
    model = read("bert-large", architectures=["BertForSequenceClassification"], id2label={"0": "no", "1": "yes"})
    assert not model.tied_embedding
    assert model.head.parameters == 1024 * 1024 + 1024 + 2 * 1024 + 2


@pytest.mark.parametrize(
    ("configuration", "parameters", "tokens"),
    [(FLUX, 11.90e9, 64 * 64 + 512), (DIT, 675e6, 16 * 16)],
)
def test_a_denoiser_has_its_published_size(configuration: dict[str, Any], parameters: float, tokens: int) -> None:
    model = parse_model(json.dumps(configuration))
    assert model.parameters == pytest.approx(parameters, rel=5e-3)
    assert model.sequence_length == tokens


def test_the_double_layers_of_a_denoiser_hold_weights_for_image_and_text_but_each_token_passes_one_set() -> None:
    double, single = load_model("flux.1-dev").layers
    assert double.parameters / single.parameters == pytest.approx(36 / 15, rel=1e-3)
    assert double.flops_per_sample == pytest.approx(single.flops_per_sample, rel=1e-3)


def test_the_name_is_that_of_its_folder_else_type_and_size() -> None:
    assert read("qwen3-8b").name == "qwen3-36x4096"
    assert read("qwen3-8b", _name_or_path="Qwen/Qwen3-8B").name == "Qwen3-8B"
    whole = {"_name_or_path": "org/its-name", "text_config": RELEASED["llama-3.1-8b"]["configuration"]}
    assert parse_model(json.dumps({"model_type": "llava", **whole}), 0).name == "its-name"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3-8b", {"model_type": "qwen33"}, "model_type is 'qwen33'; allowed are .*did you mean 'qwen3'"),
        ("qwen3-8b", {"model_type": "mamba"}, "model_type is 'mamba'; allowed are "),
        ("qwen3-8b", {"hidden_size": None}, "configuration of a qwen3 model: field 'hidden_size' is missing"),
        ("qwen3-8b", {"num_hidden_layers": 10_000}, "num_hidden_layers is 10000; it must be at most 512"),
        ("qwen3-8b", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be at most 512"),
        ("qwen3-8b", {"num_hidden_layers": "36"}, "num_hidden_layers is '36'; it must be a finite number"),
        ("qwen3-8b", {"vocab_size": -1}, "vocab_size is -1; it must be 0 or above"),
        ("qwen3-8b", {"num_key_value_heads": 7}, "kv_heads is 7; it must divide heads"),
        ("qwen3-8b", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "experts_per_token is 129; it must be from 1 to experts"),
        ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries; it must have 24"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"]}, "layer_types contains 'linear_attention'; allowed are"),
        ("whisper-large-v3", {"decoder_ffn_dim": 1280}, "decoder_ffn_dim is 1280; only 5120"),
    ],
)
def test_what_cannot_be_planned_is_refused_at_once(name: str, changes: dict[str, Any], message: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(ProfileError, match=message):
        read(name, **changes)
    assert time.monotonic() - began_s < 1.0


def test_layers_that_the_cost_model_lacks_are_refused() -> None:
    with pytest.raises(ProfileError, match="dual_attention_layers is"):
        parse_model(json.dumps({**FLUX, "dual_attention_layers": [0, 1]}))
