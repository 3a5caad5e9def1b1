"""ModelProfile: a model as runs of equal layers, with the quantities that the solver needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile

from scheduler.solver.profiles.profile_document import ProfileError, require_non_negative, require_positive
from scheduler.solver.profiles.training_software import DEFAULT_SOFTWARE, TrainingSoftware

REFERENCE_VALUE_BYTES = 2
"""Activation sizes of a profile assume two bytes per value (bf16). The solver scales them to other precisions."""

_MASTER_WEIGHT_BYTES = 4

LAYERS_MAX = 512
"""Four times the depth of GPT with a trillion parameters (128 layers, arXiv 2104.04473, table 1). More layers are taken
for a mistake and would make a search very long."""


class TrainingOptimizer(StrEnum):
    """The optimizer of a training. SGD has momentum, and PLAIN_SGD has none.

    MUON updates the matrices of layers with Muon, and embedding and head with AdamW. ADAFACTOR has no first moment.
    """

    ADAMW = "adamw"
    SGD = "sgd"
    PLAIN_SGD = "plain-sgd"
    MUON = "muon"
    ADAFACTOR = "adafactor"

    @property
    def matrix_moment_bytes(self) -> float:
        """Bytes of moments per weight of a layer, in fp32: two in AdamW, one in SGD with momentum and in Muon."""
        return _MOMENT_BYTES[self]

    @property
    def end_moment_bytes(self) -> float:
        """The same of embedding and head."""
        return _MOMENT_BYTES[TrainingOptimizer.ADAMW if self is TrainingOptimizer.MUON else self]


_FACTORED_MOMENT_BYTES = 0.01
"""Adafactor keeps the sums of a matrix's rows and columns (Shazeer and Stern, arXiv 1804.04235, section 3). These are
4 x (rows + columns) bytes, at most 0.01 per weight of a square matrix with 800 rows or more."""

_MOMENT_BYTES: Mapping[TrainingOptimizer, float] = {
    TrainingOptimizer.ADAMW: 8.0,
    TrainingOptimizer.SGD: 4.0,
    TrainingOptimizer.PLAIN_SGD: 0.0,
    TrainingOptimizer.MUON: 4.0,
    TrainingOptimizer.ADAFACTOR: _FACTORED_MOMENT_BYTES,
}


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """A run of `layers` equal layers.

    All fields are for one layer and one sample, with activations of two bytes per value.

    Attributes:
        flops_per_sample: of the forward pass's matrix products with weights; the backward pass counts twice this.
        attention_flops_per_sample: of the attention core, without what a fused kernel skips; selective recompute
            repeats them.
        traffic_bytes_per_sample: read and written in the forward pass by element-wise kernels (norms, dropout,
            activation functions, residuals, stored attention scores), which memory bandwidth limits.
        parameters: weights of one layer, experts included; `expert_parameters` of them belong to experts.
        activation_bytes_per_sample: kept for the backward pass and split by tensor parallelism;
            `selective_bytes_per_sample` of them are attention scores, which selective recompute does not keep.
        replicated_activation_bytes_per_sample: kept in full by each tensor-parallel rank (norms, masks) unless the
            sequence is sharded.
        boundary_bytes_per_sample: the layer's output, which is passed to the next layer; the input is assumed to be as
            large. Full recompute keeps nothing else.
        tokens_per_sample: rows that a sample contributes to each matrix product.
        heads: a multiple of the tensor-parallel degree. `attention_heads` is a multiple of tensor times Ulysses degree;
            0 means the same as `heads`. `head_width` is the number of values of one attention head; 0 if unknown.
        tensor_messages: all-reduces of the boundary in one forward pass; the backward pass has as many.
        experts, experts_per_token: of a mixture-of-experts layer; 0 experts is a dense layer. The latter is a mean.
        frozen: the weights are not trained (PipeTransformer, ICML'21). If the first layer is frozen, so is the
            embedding.
        cached: the trainer reads the layer's output from a cache instead of computing it (PipeTransformer's AutoCache,
            section 3.4). Only frozen layers at the front can be cached.
        forward_s_per_sample: measured forward times as pairs (tensor-parallel degree, seconds), in place of an analytic
            time; valid on the GPU that they were measured on.
    """

    layers: int
    flops_per_sample: float
    parameters: int
    activation_bytes_per_sample: int
    replicated_activation_bytes_per_sample: int
    boundary_bytes_per_sample: int
    heads: int = 1
    tensor_messages: int = 2
    attention_flops_per_sample: float = 0.0
    traffic_bytes_per_sample: int = 0
    selective_bytes_per_sample: int = 0
    tokens_per_sample: int = 1
    attention_heads: int = 0
    head_width: int = 0
    expert_parameters: int = 0
    experts: int = 0
    experts_per_token: float = 0
    frozen: bool = False
    cached: bool = False
    forward_s_per_sample: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        require_positive("layer profile", **{field: getattr(self, field) for field in _POSITIVE_FIELDS})
        require_non_negative("layer profile", **{field: getattr(self, field) for field in _NON_NEGATIVE_FIELDS})
        for part, whole in _PART_OF_WHOLE:
            if getattr(self, part) > getattr(self, whole):
                allowed = f"it must be at most {whole}, which is {getattr(self, whole)}"
                raise ProfileError(f"layer profile: {part} is {getattr(self, part)}; {allowed}")
        if not self.experts and self.expert_parameters:
            raise ProfileError(
                f"layer profile: expert_parameters is {self.expert_parameters}; it must be 0 without experts"
            )
        if self.experts and not self.experts_per_token:
            raise ProfileError(f"layer profile: experts_per_token is 0; it must be from 1 to experts ({self.experts})")
        if self.cached and not self.frozen:
            raise ProfileError("layer profile: cached is true; it must be false for a layer that is not frozen")
        self._check_measured_times()

    def _check_measured_times(self) -> None:
        for degree, seconds in self.forward_s_per_sample:
            require_positive("layer profile: forward_s_per_sample", degree=degree)
            require_positive("layer profile: forward_s_per_sample", **{f"degree {degree}": seconds})
        degrees, has = self.measured_degrees, "layer profile: forward_s_per_sample has degrees"
        if len(set(degrees)) < len(degrees):
            raise ProfileError(f"{has} {_join_degrees(degrees)}; list each degree once")
        if degrees and 1 not in degrees:
            raise ProfileError(f"{has} {_join_degrees(degrees)}; it must include degree 1")

    @property
    def has_fused_attention(self) -> bool:
        """Whether there is an attention core that keeps no scores in memory."""
        return self.attention_flops_per_sample > 0 and not self.selective_bytes_per_sample

    @property
    def measured_degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees with a measured forward time, ascending."""
        return tuple(sorted(degree for degree, _ in self.forward_s_per_sample))


def _join_degrees(degrees: tuple[int, ...]) -> str:
    return ", ".join(map(str, degrees)) or "none"


_POSITIVE_FIELDS = (
    "layers",
    "flops_per_sample",
    "parameters",
    "activation_bytes_per_sample",
    "boundary_bytes_per_sample",
    "heads",
    "tokens_per_sample",
)
_NON_NEGATIVE_FIELDS = (
    "replicated_activation_bytes_per_sample",
    "tensor_messages",
    "attention_flops_per_sample",
    "traffic_bytes_per_sample",
    "selective_bytes_per_sample",
    "attention_heads",
    "head_width",
    "expert_parameters",
    "experts",
    "experts_per_token",
)
_PART_OF_WHOLE = (
    ("selective_bytes_per_sample", "activation_bytes_per_sample"),
    ("expert_parameters", "parameters"),
    ("experts_per_token", "experts"),
)


@dataclass(frozen=True, slots=True)
class Attachment:
    """The costs that the embedding adds to the first layer, or the head with its loss to the last layer.

    Both follow the strategy of their layer. Recompute never repeats them. `columns` of the head's product are the size
    of the vocabulary; 0 if unknown, which counts as aligned.
    """

    flops_per_sample: float = 0.0
    parameters: int = 0
    activation_bytes_per_sample: int = 0
    columns: int = 0

    def __post_init__(self) -> None:
        require_non_negative(
            "embedding or head",
            columns=self.columns,
            flops_per_sample=self.flops_per_sample,
            parameters=self.parameters,
            activation_bytes_per_sample=self.activation_bytes_per_sample,
        )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A chain of layers, with an embedding attached to the first layer and a head attached to the last.

    Layers are numbered from 0 and do not include embedding and head. With `tied_embedding` the head reuses the
    embedding's weights: a plan of one stage holds them once, a plan of several stages twice.

    The embedding is frozen if the first layer is. The head is always trained: if it was tied to an embedding that is
    now frozen, it continues with its own copy of the weights.

    With `cache_frozen_layers`, the trainer keeps the outputs of the last frozen layer, so that all frozen layers are
    computed once per sample only. Costs are those of all later passes over the data.

    `optimizer` determines the memory and the traffic of the optimizer's state, `software` the kernels of attention and
    loss. `expert_imbalance` is the load of the fullest expert-parallel rank over the mean, 0 for that of the GPU
    profile.
    """

    name: str
    sequence_length: int
    layers: tuple[LayerProfile, ...]
    embedding: Attachment = Attachment()
    head: Attachment = Attachment()
    tied_embedding: bool = False
    cache_frozen_layers: bool = False
    optimizer: TrainingOptimizer = TrainingOptimizer.ADAMW
    software: TrainingSoftware = DEFAULT_SOFTWARE
    expert_imbalance: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError(f"model {self.name!r}: layers is empty; it must have at least one run of layers")
        require_positive(f"model {self.name!r}", sequence_length=self.sequence_length)
        if self.expert_imbalance and not self.expert_imbalance >= 1:
            allowed = "it must be at least 1, or 0 for that of the GPU profile"
            raise ProfileError(f"model {self.name!r}: expert_imbalance is {self.expert_imbalance}; {allowed}")
        if self.layer_count > LAYERS_MAX:
            raise ProfileError(f"model {self.name!r}: layers is {self.layer_count}; it must be at most {LAYERS_MAX}")
        for index, run in enumerate(self.layers):
            if run.measured_degrees != self.layers[0].measured_degrees:
                has = f"forward_s_per_sample has degrees {_join_degrees(run.measured_degrees)}"
                allowed = f"it must have those of layers[0], {_join_degrees(self.layers[0].measured_degrees)}"
                raise ProfileError(f"model {self.name!r}: layers[{index}]: {has}; {allowed}")
            if run.cached and index and not self.layers[index - 1].cached:
                raise ProfileError(f"model {self.name!r}: layers[{index}] is cached; all layers before it must be too")

    @property
    def layer_count(self) -> int:
        return sum(run.layers for run in self.layers)

    @property
    def parameters(self) -> int:
        """All distinct weights; those of a tied head count once."""
        head = 0 if self.shares_embedding else self.head.parameters
        return sum(run.layers * run.parameters for run in self.layers) + self.embedding.parameters + head

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a complete checkpoint: trained weights in fp32 with the optimizer's moments, frozen ones in bf16.

        The state of mixed-precision training without what follows from it (ZeRO, arXiv 1910.02054, section 3.1).
        """
        ends = self.embedding.parameters if self.layers[0].frozen else 0
        trained_ends = self.embedding.parameters - ends + (0 if self.shares_embedding else self.head.parameters)
        frozen = ends + sum(run.layers * run.parameters for run in self.layers if run.frozen)
        trained = sum(run.layers * run.parameters for run in self.layers if not run.frozen)
        of_layers = trained * (_MASTER_WEIGHT_BYTES + self.optimizer.matrix_moment_bytes)
        of_ends = trained_ends * (_MASTER_WEIGHT_BYTES + self.optimizer.end_moment_bytes)
        return of_layers + of_ends + frozen * REFERENCE_VALUE_BYTES

    @property
    def shares_embedding(self) -> bool:
        """Whether the head uses the embedding's weights and both are trained."""
        return self.tied_embedding and not self.layers[0].frozen

    @property
    def flops_per_sample(self) -> float:
        """Flops of the forward pass of one sample through the whole model."""
        ends = self.embedding.flops_per_sample + self.head.flops_per_sample
        return sum(run.layers * (run.flops_per_sample + run.attention_flops_per_sample) for run in self.layers) + ends

    @property
    def training_flops_per_sample(self) -> float:
        """Flops of the forward pass and of all gradients that are needed.

        Cached layers have no forward pass. Gradients are needed of trained weights, and of inputs behind a trained
        layer. If nothing is frozen, the result
        is three times the forward pass.
        """
        backward = not self.layers[0].frozen
        flops = self.embedding.flops_per_sample * ((not self.layers[0].cached) + 2 * backward)
        for run in self.layers:
            backward = backward or not run.frozen
            computed = not run.cached
            flops += run.layers * run.flops_per_sample * (computed + backward + (not run.frozen))
            flops += run.layers * run.attention_flops_per_sample * (computed + 2 * backward)
        return flops + self.head.flops_per_sample * (2 + backward)

    def with_frozen_layers(self, layers: int) -> ModelProfile:
        """Return the model with its first `layers` layers frozen, in addition to those that already are.

        Raises:
            ProfileError: `layers` is below 0 or above the number of layers.
        """
        if not 0 <= layers <= self.layer_count:
            allowed = f"it must be from 0 to the number of layers, {self.layer_count}"
            raise ProfileError(f"model {self.name!r}: frozen_layers is {layers}; {allowed}")
        frozen = replace(self, layers=freeze_layers(self.layers, layers))
        return frozen.with_cached_layers(frozen.frozen_layer_count) if self.cache_frozen_layers else frozen

    @property
    def frozen_layer_count(self) -> int:
        """The frozen layers at the front."""
        return sum(run.layers for run in takewhile(lambda run: run.frozen, self.layers))

    @property
    def cached_layer_count(self) -> int:
        return sum(run.layers for run in self.layers if run.cached)

    def with_cached_layers(self, layers: int) -> ModelProfile:
        """Return the model of which the trainer has cached the outputs of layer `layers` - 1, for every sample.

        Raises:
            ProfileError: `layers` is below 0 or above the number of frozen layers at the front.
        """
        if not 0 <= layers <= self.frozen_layer_count:
            allowed = f"it must be from 0 to the number of frozen layers at the front, {self.frozen_layer_count}"
            raise ProfileError(f"model {self.name!r}: cached_layers is {layers}; {allowed}")
        return replace(self, layers=_cache_layers(self.layers, layers))


def freeze_layers(runs: Iterable[LayerProfile], count: int) -> tuple[LayerProfile, ...]:
    """Return `runs` with their first `count` layers frozen."""
    first, rest = _split_runs(runs, count)
    return (*(replace(run, frozen=True) for run in first), *rest)


def _cache_layers(runs: Iterable[LayerProfile], count: int) -> tuple[LayerProfile, ...]:
    first, rest = _split_runs(runs, count)
    return (*(replace(run, cached=True) for run in first), *(replace(run, cached=False) for run in rest))


def _split_runs(runs: Iterable[LayerProfile], count: int) -> tuple[list[LayerProfile], list[LayerProfile]]:
    """Return the runs of the first `count` layers, and those of the others."""
    first: list[LayerProfile] = []
    rest: list[LayerProfile] = []
    for run in runs:
        held = min(count, run.layers)
        count -= held
        if held:
            first.append(replace(run, layers=held))
        if held < run.layers:
            rest.append(replace(run, layers=run.layers - held))
    return first, rest
