"""Configurations of Hugging Face models (`config.json`), translated into architectures.

Fields and their defaults are those of the libraries `transformers` and `diffusers`. What a model type always has, such
as norms of queries and keys, is not in its configuration and stands in the tables below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.domain.suggestions import suggest
from scheduler.solver.profiles.configuration_fields import ConfigurationFields
from scheduler.solver.profiles.hugging_face_decoders import DECODERS, read_decoder
from scheduler.solver.profiles.profile_document import ProfileError, require_object

_TYPE, _CLASS, _TEXT, _PATH = "model_type", "_class_name", "text_config", "_name_or_path"
_LATENT_SIDE = 128
"""Side of the latent image of 1,024 pixels, after an autoencoder that reduces each side to an eighth."""
_FLUX_PATCH = 2
"""Latents are packed in squares of 2 by 2 before they enter the transformer, so its own patches have side 1."""
_FLUX_TEXT, _SD3_TEXT = 512, 333
"""Text tokens: T5's in Flux, and 77 of CLIP with 256 of T5 in Stable Diffusion 3."""


def is_configuration(document: Mapping[str, Any]) -> bool:
    """Return whether a JSON document is a configuration of Hugging Face and not a model profile."""
    return _TYPE in document or _CLASS in document


def translate_configuration(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model profile that a configuration describes, in its JSON form with an architecture.

    Of a model for several kinds of input, it is that of the part for text.

    Raises:
        ProfileError: the type of model is unknown, or a field is missing or out of range. The message names it.
    """
    path = document.get(_PATH)
    if isinstance(document.get(_TEXT), dict):
        document = require_object(document[_TEXT], _TEXT)
    kind = document.get(_TYPE) or document.get(_CLASS)
    read = _READERS.get(str(kind))
    if read is None:
        allowed = f"allowed are {', '.join(_READERS)}{suggest(str(kind), tuple(_READERS))}"
        raise ProfileError(f"{_TYPE if _TYPE in document else _CLASS} is {kind!r}; {allowed}")
    architecture = read(ConfigurationFields(str(kind), document))
    kept = {field: value for field, value in architecture.items() if value not in (0, False, None, [])}
    name = str(document.get(_PATH) or path or f"{kind}-{kept['layers']}x{kept['hidden']}")
    return {"name": name.rstrip("/").rpartition("/")[2] or name, "architecture": kept}


_Architecture = dict[str, Any]


def _read_bert(fields: ConfigurationFields) -> _Architecture:
    words = _read_encoder(fields)
    return words | {
        "family": "encoder",
        "vocabulary": fields.read("vocab_size"),
        "sequence_length": fields.read("max_position_embeddings"),
        "learned_positions": True,
        "token_types": fields.read("type_vocab_size", default=0),
        "classes": _count_classes(fields) if _has_class_head(fields) else 0,
        "tied_embedding": not _has_class_head(fields) and fields.is_set("tie_word_embeddings", default=True),
    }


def _read_vit(fields: ConfigurationFields) -> _Architecture:
    return _read_encoder(fields) | {
        "family": "vision",
        "image_size": fields.read("image_size"),
        "patch_size": fields.read("patch_size"),
        "channels": fields.read("num_channels", default=3),
        "classes": _count_classes(fields),
    }


def _read_encoder(fields: ConfigurationFields) -> _Architecture:
    return {
        "layers": fields.read_layers("num_hidden_layers"),
        "hidden": fields.read("hidden_size"),
        "heads": fields.read("num_attention_heads"),
        "ffn": fields.read("intermediate_size"),
        "biases": True,
        "dropout": fields.any_above_0("hidden_dropout_prob", "attention_probs_dropout_prob"),
    }


def _has_class_head(fields: ConfigurationFields) -> bool:
    classes = fields.document.get("architectures")
    return isinstance(classes, list) and any(str(name).endswith("ForSequenceClassification") for name in classes)


def _count_classes(fields: ConfigurationFields) -> int:
    labels = fields.document.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else fields.read("num_labels", default=2)


def _read_t5(fields: ConfigurationFields) -> _Architecture:
    length = fields.read("n_positions", default=512)
    activation = str(fields.document.get("feed_forward_proj", "relu"))
    return {
        "family": "encoder-decoder",
        "layers": fields.read_layers("num_layers"),
        "decoder_layers": fields.read_layers("num_decoder_layers", "num_layers"),
        "hidden": fields.read("d_model"),
        "heads": fields.read("num_heads"),
        "head_dim": fields.read("d_kv"),
        "ffn": fields.read("d_ff"),
        "vocabulary": fields.read("vocab_size"),
        "sequence_length": length,
        "target_length": length,
        "relative_buckets": fields.read("relative_attention_num_buckets", default=32),
        "gated_mlp": activation.startswith("gated"),
        "dropout": fields.any_above_0("dropout_rate"),
        "stored_scores": True,  # The bias of relative positions is added to the scores.
        "tied_embedding": fields.is_set("tie_word_embeddings", default=True),
    }


def _read_whisper(fields: ConfigurationFields) -> _Architecture:
    heads, ffn = fields.read("encoder_attention_heads"), fields.read("encoder_ffn_dim")
    fields.require_equal("decoder_attention_heads", heads)
    fields.require_equal("decoder_ffn_dim", ffn)
    return {
        "family": "encoder-decoder",
        "layers": fields.read_layers("encoder_layers"),
        "decoder_layers": fields.read_layers("decoder_layers"),
        "hidden": fields.read("d_model"),
        "heads": heads,
        "ffn": ffn,
        "vocabulary": fields.read("vocab_size"),
        "channels": fields.read("num_mel_bins"),
        "sequence_length": fields.read("max_source_positions"),
        "target_length": fields.read("max_target_positions"),
        "learned_positions": True,
        "biases": True,
        "dropout": fields.any_above_0("dropout", "attention_dropout"),
        "tied_embedding": fields.is_set("tie_word_embeddings", default=True),
    }


@dataclass(frozen=True, slots=True)
class _Denoiser:
    """Names of a denoiser's fields, with sizes that its configuration leaves out."""

    text: int = 0
    image_side: int = 0
    single_layers: str = ""
    qk_norms: bool = False

    def read(self, fields: ConfigurationFields) -> _Architecture:
        fields.require_absent("dual_attention_layers")
        heads, width = fields.read("num_attention_heads"), fields.read("attention_head_dim")
        has_qk_norms = self.qk_norms or fields.has("qk_norm")
        return {
            "family": "diffusion",
            "layers": fields.read_layers("num_layers"),
            "single_layers": fields.read_layers(self.single_layers) if self.single_layers else 0,
            "hidden": heads * width,
            "heads": heads,
            "ffn": 4 * heads * width,
            "image_size": fields.read("sample_size", default=self.image_side or None),
            "patch_size": fields.read("patch_size", default=1),
            "channels": fields.read("in_channels"),
            "target_length": self.text,
            "target_width": fields.read("joint_attention_dim") if self.text else 0,
            "biases": True,
            "qk_norms": has_qk_norms,
        }


_READERS: Mapping[str, Callable[[ConfigurationFields], _Architecture]] = {
    **dict.fromkeys(DECODERS, read_decoder),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _read_bert),
    **dict.fromkeys(("vit", "deit"), _read_vit),
    **dict.fromkeys(("t5", "mt5"), _read_t5),
    "whisper": _read_whisper,
    "FluxTransformer2DModel": _Denoiser(
        _FLUX_TEXT, _LATENT_SIDE // _FLUX_PATCH, "num_single_layers", qk_norms=True
    ).read,
    "SD3Transformer2DModel": _Denoiser(_SD3_TEXT).read,
    "DiTTransformer2DModel": _Denoiser().read,
}
