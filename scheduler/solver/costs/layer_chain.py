"""The model as a chain of layers, with embedding and head attached to its ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from scheduler.solver.instance import Floats, Ints
from scheduler.solver.profiles.hardware_profile import HardwareProfile, Precision
from scheduler.solver.profiles.model_profile import REFERENCE_VALUE_BYTES, Attachment, LayerProfile, ModelProfile
from scheduler.solver.profiles.training_software import LossKernel, MatrixProducts, TensorMessages

_EMBEDDING_TRAFFIC = 30
"""Traffic as a multiple of the boundary, for both passes: look-up, positions, dropout, and the gradient's scatter
into the table."""

_FROZEN_EMBEDDING_TRAFFIC = 19 / 2
"""The same for a forward pass alone. Bytes per value of 2 bytes: look-up of tokens 2 + 2, of positions 2 + 2, their
sum 4 + 2, dropout with its mask 2 + 2 + 1."""

_LOSS_TRAFFIC = 52 / 6
"""Traffic as a multiple of the logits (6 bytes each: bf16 and fp32). Megatron-LM's vocabulary-parallel cross-entropy
runs these kernels: cast to fp32 2 + 4, maximum 4, subtract it 4 + 4, exponentiate 4 + 4, sum 4, divide 4 + 4;
backward, scale by the gradient 4 + 4 and cast back 4 + 2. That is 52 bytes per logit; accesses to a single logit per
token are left out."""

_LOGIT_COPIES = 2
"""The logits and their gradient, which has the same size."""

_FUSED_LOGIT_SHARE = 2 / 6
"""Of a logit's 6 bytes in bf16 and fp32, a fused loss keeps the 2 in bf16, and overwrites them with the gradient."""

_FUSED_LOSS_TRAFFIC = 12 / 6
"""Traffic of a fused loss as a multiple of the logits (6 bytes each). The head's product writes a logit of 2 bytes, the
loss reads it, reads it again and overwrites it with the gradient, and two products of the backward pass read that. The
logits are by far the largest operand of these products."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the chain. Equal layers compare equal. Bytes are per sample, at the training precision.

    Attributes:
        flops: of the forward pass's matrix products with weights; `attention_flops` are those of the attention core,
            and `attached_flops` those of embedding or head, which recompute never repeats.
        traffic_bytes: moved by element-wise kernels in the forward pass.
        parameters: all weights; `expert_parameters` of them belong to experts.
        unit_parameters: the largest unit that FSDP gathers at once; layer, embedding and head are units.
        activation_bytes, replicated_bytes: activations that tensor parallelism splits, and those that it does not;
            `selective_bytes` of the former are attention scores.
        attached_bytes: kept even under recompute (logits). `attached_traffic_bytes` are moved by embedding or head in
            both passes; `attached_messages` are all-reduces of the boundary because the vocabulary is split.
        product_parameters: weights of the head's product, which has `columns` columns over all tensor-parallel ranks; 0
            columns means unknown and counts as aligned.
        tied_parameters: weights that both the first and the last stage hold, and whose gradients they sum.
            `tied_inside`: both copies are in one node.
        trained: the weights change. `backward`: gradients pass through the layer, because it or an earlier layer is
            trained.
        attached_trained: the weights of embedding or head change. `trained_head_parameters`: of a frozen layer, the
            part of `parameters` that changes because it belongs to the head.
        head_width: values of an attention head, 0 if unknown. `attention_kernel`: generation of the fused kernel, 0 for
            that of the GPU profile. `overlaps_tensor`: messages of a sharded sequence overlap with products.
        fp8_products: products with weights are in fp8, without those of the head.
        expert_imbalance: as in ModelProfile.
        computed: the forward pass runs; otherwise a cache has the output. `cached_bytes` are read from the cache, or
            written to it, in each forward pass.
        measured_s: measured forward time of one sample by tensor-parallel degree, if any.
        dense_moment_bytes: bytes of the optimizer's moments per trained weight outside of experts, on average;
            `expert_moment_bytes` per weight of experts. The defaults are AdamW's.
    """

    flops: float
    attention_flops: float
    attached_flops: float
    traffic_bytes: int
    parameters: int
    expert_parameters: int
    unit_parameters: int
    activation_bytes: int
    selective_bytes: int
    replicated_bytes: int
    boundary_bytes: int
    attached_bytes: int
    attached_traffic_bytes: int
    attached_messages: int
    product_parameters: int
    columns: int
    tied_parameters: int
    tied_inside: bool
    tokens: int
    heads: int
    attention_heads: int
    tensor_messages: int
    experts: int
    experts_per_token: float
    trained: bool
    backward: bool
    attached_trained: bool
    trained_head_parameters: int
    computed: bool
    cached_bytes: int
    measured_s: tuple[tuple[int, float], ...]
    dense_moment_bytes: float = 8.0
    expert_moment_bytes: float = 8.0
    head_width: int = 0
    attention_kernel: int = 0
    overlaps_tensor: bool = False
    fp8_products: bool = False
    expert_imbalance: float = 0.0


class LayerChain(tuple[Layer, ...]):
    """The layers in order. The hash is computed once, because chains are keys of many caches."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The T distinct layers, in the order of their first appearance."""
        return tuple(dict.fromkeys(self))

    @cached_property
    def types(self) -> Ints:
        """[L]: index in `kinds` of each layer."""
        numbers = {layer: number for number, layer in enumerate(self.kinds)}
        return np.array([numbers[layer] for layer in self], dtype=np.int64)


def build_layer_chain(model: ModelProfile, precision: Precision, *, stages: int, one_node: bool = False) -> LayerChain:
    """Return the layers of `model` in order, for a plan of `stages` stages. `one_node` means that all are in one node.

    A tied head needs no memory of its own while it shares a stage with the embedding. In a plan of several stages, the
    last stage holds a copy of the embedding. The embedding is frozen if the first layer is; the head never is.
    """
    copied = model.shares_embedding and stages > 1
    return _build_layer_chain(model, precision.value_bytes, copied, copied and one_node)


@lru_cache(maxsize=256)
def _build_layer_chain(model: ModelProfile, value_bytes: int, copied: bool, one_node: bool) -> LayerChain:
    scale = value_bytes / REFERENCE_VALUE_BYTES
    layers: list[Layer] = []
    backward = False
    for run in model.layers:
        backward = backward or not run.frozen
        layer = _build_layer(run, scale, model, backward=backward)
        moment_bytes = model.optimizer.matrix_moment_bytes
        layer = replace(layer, dense_moment_bytes=moment_bytes, expert_moment_bytes=moment_bytes)
        layers.extend([layer] * run.layers)
    read, written = model.cached_layer_count, model.frozen_layer_count if model.cache_frozen_layers else 0
    for number in {read, written} - {0}:
        layers[number - 1] = replace(layers[number - 1], cached_bytes=layers[number - 1].boundary_bytes)
    tied = replace(layers[0], tied_parameters=model.embedding.parameters if copied else 0, tied_inside=one_node)
    layers[0] = _attach_embedding(tied, model.embedding, scale)
    layers[0] = _add_end_moments(layers[0], model.embedding.parameters, model.optimizer.end_moment_bytes)
    tied = replace(layers[-1], tied_parameters=model.embedding.parameters if copied else 0, tied_inside=one_node)
    shared = model.shares_embedding and not copied
    layers[-1] = _attach_head(tied, model.head, scale, model.software.loss, shared=shared)
    layers[-1] = _add_end_moments(layers[-1], 0 if shared else model.head.parameters, model.optimizer.end_moment_bytes)
    return LayerChain(layers)


def _build_layer(run: LayerProfile, scale: float, model: ModelProfile, *, backward: bool) -> Layer:
    return Layer(
        flops=run.flops_per_sample,
        attention_flops=run.attention_flops_per_sample,
        attached_flops=0.0,
        traffic_bytes=round(run.traffic_bytes_per_sample * scale),
        parameters=run.parameters,
        expert_parameters=run.expert_parameters,
        unit_parameters=run.parameters,
        activation_bytes=round(run.activation_bytes_per_sample * scale),
        selective_bytes=round(run.selective_bytes_per_sample * scale),
        replicated_bytes=round(run.replicated_activation_bytes_per_sample * scale),
        boundary_bytes=round(run.boundary_bytes_per_sample * scale),
        attached_bytes=0,
        attached_traffic_bytes=0,
        attached_messages=0,
        product_parameters=0,
        columns=0,
        tied_parameters=0,
        tied_inside=False,
        tokens=run.tokens_per_sample,
        heads=run.heads,
        attention_heads=run.attention_heads or run.heads,
        head_width=run.head_width,
        attention_kernel=model.software.attention.generation,
        overlaps_tensor=model.software.tensor_messages is TensorMessages.OVERLAPPED,
        fp8_products=model.software.products is MatrixProducts.FP8,
        expert_imbalance=model.expert_imbalance,
        tensor_messages=run.tensor_messages,
        experts=run.experts,
        experts_per_token=run.experts_per_token,
        trained=not run.frozen,
        backward=backward,
        attached_trained=not run.frozen,
        trained_head_parameters=0,
        computed=not run.cached,
        cached_bytes=0,
        measured_s=run.forward_s_per_sample,
    )


def _attach_embedding(layer: Layer, embedding: Attachment, scale: float) -> Layer:
    kept_bytes = round(embedding.activation_bytes_per_sample * scale)
    factor = _EMBEDDING_TRAFFIC if layer.trained else _FROZEN_EMBEDDING_TRAFFIC
    looks_up = layer.computed and bool(embedding.parameters)
    traffic_bytes = round(factor * layer.boundary_bytes) if looks_up else 0
    return replace(
        layer,
        attached_flops=layer.attached_flops + layer.computed * embedding.flops_per_sample,
        parameters=layer.parameters + embedding.parameters,
        unit_parameters=max(layer.unit_parameters, embedding.parameters),
        attached_bytes=layer.attached_bytes + kept_bytes,
        attached_traffic_bytes=layer.attached_traffic_bytes + traffic_bytes,
        attached_messages=layer.attached_messages + looks_up,
    )


def _attach_head(layer: Layer, head: Attachment, scale: float, loss: LossKernel, *, shared: bool) -> Layer:
    logits_bytes = round(head.activation_bytes_per_sample * scale)
    is_fused = loss is LossKernel.FUSED
    kept_bytes = round(_FUSED_LOGIT_SHARE * logits_bytes) if is_fused else _LOGIT_COPIES * logits_bytes
    traffic_bytes = round((_FUSED_LOSS_TRAFFIC if is_fused else _LOSS_TRAFFIC) * logits_bytes)
    parameters = 0 if shared else head.parameters
    return replace(
        layer,
        attached_flops=layer.attached_flops + head.flops_per_sample,
        parameters=layer.parameters + parameters,
        unit_parameters=max(layer.unit_parameters, parameters),
        attached_bytes=layer.attached_bytes + kept_bytes,
        attached_traffic_bytes=layer.attached_traffic_bytes + traffic_bytes,
        attached_messages=layer.attached_messages + bool(head.flops_per_sample and layer.backward),
        attached_trained=True,
        trained_head_parameters=0 if layer.trained else parameters,
        product_parameters=head.parameters,
        columns=head.columns,
    )


def _add_end_moments(layer: Layer, parameters: int, moment_bytes: float) -> Layer:
    """Return the layer with the moments of `parameters`, which embedding or head have added to its weights."""
    if not layer.trained:
        # At most the head is trained.
        return replace(layer, dense_moment_bytes=moment_bytes)
    dense = layer.parameters - layer.expert_parameters
    added = parameters * (moment_bytes - layer.dense_moment_bytes) / max(1, dense)
    return replace(layer, dense_moment_bytes=layer.dense_moment_bytes + added)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """Layer types as columns, so that all strategies are costed at once. Every array is [T, 1], as in Layer.

    Attributes:
        expert_flops: part of `flops`, in the experts that a sample's tokens visit.
        key_value_share: size of keys and values relative to queries (grouped queries have fewer key-value heads).
        tied_inside, trained, backward, attached_trained, computed, overlaps_tensor, fp8_products: 1 or 0.
    """

    flops: Floats
    attention_flops: Floats
    attached_flops: Floats
    expert_flops: Floats
    traffic_bytes: Floats
    dense_parameters: Floats
    expert_parameters: Floats
    unit_parameters: Floats
    activation_bytes: Floats
    selective_bytes: Floats
    replicated_bytes: Floats
    boundary_bytes: Floats
    attached_bytes: Floats
    attached_traffic_bytes: Floats
    attached_messages: Floats
    product_parameters: Floats
    columns: Floats
    tied_parameters: Floats
    tied_inside: Floats
    tensor_messages: Floats
    experts: Floats
    experts_per_token: Floats
    key_value_share: Floats
    head_width: Floats
    attention_kernel: Floats
    overlaps_tensor: Floats
    fp8_products: Floats
    expert_imbalance: Floats
    trained: Floats
    backward: Floats
    attached_trained: Floats
    trained_head_parameters: Floats
    computed: Floats
    cached_bytes: Floats
    dense_moment_bytes: Floats
    expert_moment_bytes: Floats

    def get_expert_imbalance(self, hardware: HardwareProfile) -> Floats:
        """Return [T, 1]: the imbalance that the model reports, else that of the GPU profile."""
        return np.where(self.expert_imbalance > 0, self.expert_imbalance, hardware.expert_imbalance)


@lru_cache(maxsize=64)
def build_layer_table(kinds: tuple[Layer, ...]) -> LayerTable:
    """Return the columns of `kinds`, in their order."""
    rows = [
        (
            kind.flops,
            kind.attention_flops,
            kind.attached_flops,
            _compute_expert_flops(kind),
            kind.traffic_bytes,
            kind.parameters - kind.expert_parameters,
            kind.expert_parameters,
            kind.unit_parameters,
            kind.activation_bytes,
            kind.selective_bytes,
            kind.replicated_bytes,
            kind.boundary_bytes,
            kind.attached_bytes,
            kind.attached_traffic_bytes,
            kind.attached_messages,
            kind.product_parameters,
            kind.columns,
            kind.tied_parameters,
            kind.tied_inside,
            kind.tensor_messages,
            kind.experts,
            kind.experts_per_token,
            kind.heads / kind.attention_heads,
            kind.head_width,
            kind.attention_kernel,
            kind.overlaps_tensor,
            kind.fp8_products,
            kind.expert_imbalance,
            kind.trained,
            kind.backward,
            kind.attached_trained,
            kind.trained_head_parameters,
            kind.computed,
            kind.cached_bytes,
            kind.dense_moment_bytes,
            kind.expert_moment_bytes,
        )
        for kind in kinds
    ]
    return LayerTable(*np.array(rows, dtype=np.float64).T[:, :, None])


def _compute_expert_flops(kind: Layer) -> float:
    """Return two flops per weight and token, over the experts that a token visits."""
    if not kind.experts:
        return 0.0
    visited = kind.expert_parameters * kind.experts_per_token / kind.experts
    return min(kind.flops, 2.0 * kind.tokens * visited)
