"""Decoders of the library `transformers`: their types, and how their configurations describe layers and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scheduler.solver.profiles.configuration_fields import ConfigurationFields

LENGTH_MAX = 8_192
"""The sequence length of a decoder is what its positions allow, but no more than this unless the user states it: most
trainings use less than the 131,072 tokens that many models accept."""
_GLOBAL, _LOCAL, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_WINDOW_FIELDS = {_GLOBAL: "", _LOCAL: "sliding_window", _CHUNKED: "attention_chunk_size"}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Properties and defaults of a type of decoder that its configurations leave out.

    Attributes:
        global_every: every such layer attends to all tokens and the others to a window, if the configuration lists no
            types of layers; 0 if all layers are alike.
        window: tokens of the window if the configuration does not state it.
        has_window_flag: a window counts only with `use_sliding_window`.
        qkv_biases: what `attention_bias` is if it is absent.
        is_tied: what `tie_word_embeddings` is if it is absent.
        sizes: other values of absent fields.
    """

    gated_mlp: bool = True
    biases: bool = False
    qkv_biases: bool = False
    qk_norms: bool = False
    output_norms: bool = False
    learned_positions: bool = False
    is_tied: bool = False
    global_every: int = 0
    window: int = 0
    has_window_flag: bool = False
    sizes: tuple[tuple[str, int], ...] = ()


_GEMMA_3_SIZES = (
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("vocab_size", 262_208),
    ("max_position_embeddings", 131_072),
)
"""The released configurations of Gemma 3 leave these out where they have the defaults of `transformers`."""

DECODERS = {
    "llama": Decoder(),
    "mistral": Decoder(),
    "mixtral": Decoder(),
    "qwen2": Decoder(qkv_biases=True, has_window_flag=True),
    "qwen2_moe": Decoder(qkv_biases=True, has_window_flag=True),
    "qwen3": Decoder(qk_norms=True, has_window_flag=True),
    "qwen3_moe": Decoder(qk_norms=True, has_window_flag=True),
    "deepseek_v2": Decoder(),
    "deepseek_v3": Decoder(),
    "gemma": Decoder(is_tied=True, sizes=(("head_dim", 256),)),
    "gemma2": Decoder(is_tied=True, output_norms=True, global_every=2, window=4_096, sizes=(("head_dim", 256),)),
    "gemma3_text": Decoder(
        is_tied=True, qk_norms=True, output_norms=True, global_every=6, window=4_096, sizes=_GEMMA_3_SIZES
    ),
    "gpt_oss": Decoder(qkv_biases=True, global_every=2, window=128),
    "gpt2": Decoder(gated_mlp=False, biases=True, learned_positions=True, is_tied=True),
    "gpt_neox": Decoder(gated_mlp=False, biases=True),
    "llama4_text": Decoder(global_every=4, window=8_192),
    "phi": Decoder(gated_mlp=False, biases=True),
    "phi3": Decoder(),
    "phimoe": Decoder(qkv_biases=True),
    "chatglm": Decoder(qkv_biases=True),
    "glm": Decoder(qkv_biases=True, sizes=(("head_dim", 128),)),
    "glm4": Decoder(qkv_biases=True, output_norms=True, sizes=(("head_dim", 128),)),
    "glm4_moe": Decoder(qkv_biases=True),
    "olmo": Decoder(),
    "olmo2": Decoder(qk_norms=True),
    "olmo3": Decoder(qk_norms=True, global_every=4, window=4_096),
    "olmoe": Decoder(qk_norms=True),
}


def read_decoder(fields: ConfigurationFields) -> dict[str, Any]:
    """Return the fields of an architecture; raises ProfileError as `translate_configuration`."""
    kind = DECODERS[fields.kind]
    missing = {name: value for name, value in kind.sizes if not fields.has(name)}
    fields = ConfigurationFields(fields.kind, {**fields.document, **missing})
    layers = fields.read_layers("num_hidden_layers", "n_layer", "num_layers")
    hidden, heads = fields.read("hidden_size", "n_embd"), fields.read("num_attention_heads", "n_head")
    positions = fields.read("max_position_embeddings", "n_positions", "seq_length", default=LENGTH_MAX)
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.read("num_key_value_heads", "multi_query_group_num", default=heads),
        "head_dim": fields.read("head_dim", "kv_channels", default=0),
        "ffn": fields.read(
            *("intermediate_size", "n_inner", "ffn_hidden_size"), default=4 * hidden if fields.kind == "gpt2" else None
        ),
        "vocabulary": fields.read("vocab_size", "padded_vocab_size"),
        "sequence_length": min(positions, LENGTH_MAX),
        "learned_positions": kind.learned_positions,
        "gated_mlp": kind.gated_mlp,
        "biases": kind.biases,
        "qkv_biases": not kind.biases and fields.is_set("attention_bias", default=kind.qkv_biases),
        "qk_norms": kind.qk_norms or (fields.kind == "glm4_moe" and fields.is_set("use_qk_norm")),
        "output_norms": kind.output_norms,
        "dropout": fields.any_above_0("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop"),
        "tied_embedding": fields.is_set("tie_word_embeddings", default=kind.is_tied),
        **_read_windows(fields, kind, layers),
        **_read_latent_attention(fields),
        **_read_experts(fields, layers),
    }


def _read_windows(fields: ConfigurationFields, kind: Decoder, layers: int) -> dict[str, Any]:
    if kind.has_window_flag and not fields.is_set("use_sliding_window"):
        return {}
    if fields.has("layer_types"):
        types = fields.list_words("layer_types", _WINDOW_FIELDS, layers)
        field = next((_WINDOW_FIELDS[word] for word in types if word != _GLOBAL), "")
        window = fields.read(field, default=kind.window or None) if field else 0
        return {"window": window, "global_layers": [n for n, word in enumerate(types) if window and word == _GLOBAL]}
    window = fields.read("sliding_window", "attention_chunk_size", default=kind.window)
    if kind.has_window_flag:  # The first `max_window_layers` layers attend to all tokens.
        first = fields.read("max_window_layers", default=0)
        return {"window": window, "global_layers": list(range(first))} if window and first < layers else {}
    every = fields.read("sliding_window_pattern", default=kind.global_every)
    return {"window": window, "global_layers": list(range(every - 1, layers, every)) if window and every else []}


def _read_latent_attention(fields: ConfigurationFields) -> dict[str, Any]:
    if not fields.has("kv_lora_rank"):
        return {}
    rotary = fields.read("qk_rope_head_dim")
    ranks = {"key_rank": fields.read("kv_lora_rank"), "rotary_dim": rotary}
    if fields.has("q_lora_rank"):
        ranks["query_rank"] = fields.read("q_lora_rank")
    return {
        "latent_attention": ranks,
        "kv_heads": fields.read("num_attention_heads"),
        "head_dim": fields.read("qk_nope_head_dim") + rotary,
        "value_dim": fields.read("v_head_dim"),
    }


def _read_experts(fields: ConfigurationFields, layers: int) -> dict[str, Any]:
    experts = fields.read("n_routed_experts", "num_local_experts", "num_experts", default=0)
    if not experts:
        return {}
    width = fields.read("moe_intermediate_size", "intermediate_size")
    read = {
        "experts": experts,
        "experts_per_token": fields.read("num_experts_per_tok", "experts_per_token"),
        "expert_ffn": width,
        "shared_ffn": fields.read("shared_expert_intermediate_size", default=0)
        or width * fields.read("n_shared_experts", default=0),
        "dense_layers": _list_dense_layers(fields, layers),
    }
    if fields.kind == "llama4_text":  # One expert is shared, and dense layers have a width of their own.
        read |= {"shared_ffn": width, "ffn": fields.read("intermediate_size_mlp")}
    return read


def _list_dense_layers(fields: ConfigurationFields, layers: int) -> list[int]:
    first = fields.read("first_k_dense_replace", default=0)
    every = fields.read("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1) or 1
    named = {*fields.list_numbers("mlp_only_layers")}
    # Qwen and Llama 4 count layers from 1 (every second one is layer 1, 3, ...), DeepSeek from 0.
    offset = 0 if fields.has("moe_layer_freq") else 1
    return [n for n in range(layers) if n < first or n in named or (n + offset) % every]
