"""The architecture of a transformer, from which the costs of its layers are derived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from scheduler.solver.profiles.model_profile import LAYERS_MAX
from scheduler.solver.profiles.profile_document import ProfileError, require_positive


class Family(StrEnum):
    """The kind of a transformer.

    Decoder (GPT, Llama), encoder (BERT), both (T5, Whisper), encoder over image patches (ViT), or denoiser of image
    patches (DiT, arXiv 2212.09748; of patches and text in MM-DiT, arXiv 2403.03206, section 4).
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder-decoder"
    VISION = "vision"
    DIFFUSION = "diffusion"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values are products of a compressed vector of `key_rank` values, queries of one of `query_rank` (0 if
    queries are not compressed). `rotary_dim` of the values of a head's key are shared by all heads.
    """

    key_rank: int
    rotary_dim: int
    query_rank: int = 0

    def __post_init__(self) -> None:
        require_positive("latent_attention", key_rank=self.key_rank, rotary_dim=self.rotary_dim)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Properties that differ between layers of a stack. `window` is how many tokens a token attends to, 0 for all."""

    window: int
    has_experts: bool


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformer. Sizes count values, not bytes; 0 means that the transformer has no such part.

    Attributes:
        layers: of the encoder if there are two stacks; `decoder_layers` are then those of the decoder. A denoiser has
            `single_layers` more, in which one set of weights serves image and text (Flux).
        kv_heads: fewer than `heads` in grouped-query attention (arXiv 2305.13245); 0 for as many.
        head_dim: width of one head; 0 for hidden / heads. `value_dim`: of its values, if that is another.
        sequence_length: tokens that enter the first stack; `target_length` tokens enter the decoder of two stacks, or
            are the text of a denoiser, of which each has `target_width` values.
        positions: rows of a learned position table. `token_types`: rows of BERT's segment table.
        relative_buckets: rows of a stack's relative position table (T5).
        classes: of a classification head; without it, the head predicts tokens.
        image_size, patch_size: pixels along one side of a square; `channels` is the number of values per pixel. Of
            audio (Whisper), `channels` are the values of a frame that enters the first of two convolutions.
        window: tokens before a token that it attends to (arXiv 2004.05150), but in `global_layers`, numbered from 0.
        experts, experts_per_token: of a mixture of experts in each feed-forward block; the latter is a mean, so it may
            be a fraction. `dense_layers`, numbered from 0, have no experts.
        ffn: inner width of a feed-forward block. `expert_ffn`: of one expert, if that is another. `shared_ffn`: of all
            shared experts together, which every token passes (DeepSeekMoE, arXiv 2401.06066, section 3.2).
        frozen_layers: number of layers, from the first one on, that are not trained.
        biases: each matrix product has a bias, and norms shift (LayerNorm); `qkv_biases`: only query, key and value
            have one.
        qk_norms: queries and keys are normalised. `output_norms`: so is the output of each block.
        stored_scores: attention stores its scores in memory; otherwise they are recomputed in blocks, as in
            FlashAttention (arXiv 2205.14135).
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    ffn: int
    sequence_length: int
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    latent_attention: LatentAttention | None = None
    vocabulary: int = 0
    decoder_layers: int = 0
    single_layers: int = 0
    target_length: int = 0
    target_width: int = 0
    positions: int = 0
    token_types: int = 0
    relative_buckets: int = 0
    classes: int = 0
    image_size: int = 0
    patch_size: int = 0
    channels: int = 0
    window: int = 0
    global_layers: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: float = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    frozen_layers: int = 0
    gated_mlp: bool = False
    biases: bool = False
    qkv_biases: bool = False
    qk_norms: bool = False
    output_norms: bool = False
    dropout: bool = False
    stored_scores: bool = False
    tied_embedding: bool = False

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "ffn", "sequence_length")
        require_positive("architecture", **{field: getattr(self, field) for field in sizes})
        if not self.head_dim and self.hidden % self.heads:
            allowed = f"it must divide hidden, which is {self.hidden}, or head_dim must be given"
            raise ProfileError(f"architecture: heads is {self.heads}; {allowed}")
        if self.heads % self.num_kv_heads:
            raise ProfileError(f"architecture: kv_heads is {self.kv_heads}; it must divide heads ({self.heads})")
        if self.latent_attention and self.latent_attention.rotary_dim >= self.head_width:
            allowed = f"it must be below head_dim, which is {self.head_width}"
            raise ProfileError(f"latent_attention: rotary_dim is {self.latent_attention.rotary_dim}; {allowed}")
        count = self.layers + self.decoder_layers + self.single_layers
        if count > LAYERS_MAX:
            raise ProfileError(f"architecture: layers is {count}; it must be at most {LAYERS_MAX}")
        self._check_experts()
        self._check_layer_numbers()
        if self.frozen_layers > self.layers + self.decoder_layers:
            allowed = f"it must be at most {self.layers + self.decoder_layers}, the layers there are"
            raise ProfileError(f"architecture: frozen_layers is {self.frozen_layers}; {allowed}")
        if self.tied_embedding and self.classes:
            raise ProfileError("architecture: tied_embedding is true; it must be false with a head of classes")

    def _check_experts(self) -> None:
        per_token = self.experts_per_token
        if self.experts and not 1 <= per_token <= self.experts:
            allowed = f"it must be from 1 to experts ({self.experts})"
            raise ProfileError(f"architecture: experts_per_token is {per_token}; {allowed}")
        for field in ("experts_per_token", "expert_ffn", "shared_ffn", "dense_layers"):
            if getattr(self, field) and not self.experts:
                raise ProfileError(
                    f"architecture: {field} is {getattr(self, field)}; it must be absent without experts"
                )

    def _check_layer_numbers(self) -> None:
        if self.global_layers and not self.window:
            raise ProfileError(
                f"architecture: global_layers is {list(self.global_layers)}; it must be absent without window"
            )
        for field in ("global_layers", "dense_layers"):
            for number in getattr(self, field):
                if not 0 <= number < self.layers:
                    allowed = f"allowed are numbers from 0 to {self.layers - 1}"
                    raise ProfileError(f"architecture: {field} contains {number}; {allowed}")

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Values of one token's query and key in one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Values of one token's queries, over all heads."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """Values of one token's keys, over all heads that have their own."""
        return self.num_kv_heads * self.head_width

    @property
    def value_width(self) -> int:
        """Values of one token's values, over all heads that have their own."""
        return self.num_kv_heads * (self.value_dim or self.head_width)

    @property
    def context_width(self) -> int:
        """Values of one token's output of attention, before the last projection."""
        return self.heads * (self.value_dim or self.head_width)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: a scale, and a shift if the model has biases."""
        return (2 if self.biases else 1) * self.hidden

    def list_layer_kinds(self) -> Iterator[tuple[LayerKind, int]]:
        """Yield each kind of layer and how many follow one another, along the first stack."""
        kinds = (
            LayerKind(
                window=0 if number in self.global_layers or self.window >= self.sequence_length else self.window,
                has_experts=self.experts > 0 and number not in self.dense_layers,
            )
            for number in range(self.layers)
        )
        for kind, layers in groupby(kinds):
            yield kind, len(list(layers))
