"""The model as the search sees it: one layer after the other, with embedding and head attached to the ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from scheduler.solver.profiles.hardware_profile import Precision
from scheduler.solver.profiles.model_profile import REFERENCE_VALUE_BYTES, LayerProfile, ModelProfile


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the chain; equal layers are equal values. Bytes are at the training precision.

    Attributes:
        flops: forward, of one sample; `attached_flops` those of embedding or head, which recompute never repeats.
        unit_parameters: the largest part that FSDP gathers at once (a layer, the embedding and the head are units).
        activation_bytes, replicated_bytes: of one sample, split by tensor parallelism and not.
        attached_bytes: of one sample, kept even under recompute (logits).
    """

    flops: float
    attached_flops: float
    parameters: int
    unit_parameters: int
    activation_bytes: int
    replicated_bytes: int
    boundary_bytes: int
    attached_bytes: int
    heads: int
    tensor_messages: int


@lru_cache(maxsize=256)
def chain(model: ModelProfile, precision: Precision, *, stages: int) -> tuple[Layer, ...]:
    """The layers of `model` in order, for a plan of `stages` stages.

    A tied head costs no memory of its own while it shares a stage with the embedding. In a plan of several stages
    the last stage holds a copy of the embedding.
    """
    scale = precision.value_bytes / REFERENCE_VALUE_BYTES
    layers = [_layer(run, scale) for run in model.layers for _ in range(run.layers)]
    embedding_bytes = round(model.embedding.activation_bytes_per_sample * scale)
    layers[0] = _attach(layers[0], model.embedding.flops_per_sample, model.embedding.parameters, embedding_bytes)
    shared = model.tied_embedding and stages == 1
    head_parameters = 0 if shared else model.head.parameters
    head_bytes = round(model.head.activation_bytes_per_sample * scale)
    layers[-1] = _attach(layers[-1], model.head.flops_per_sample, head_parameters, head_bytes)
    return tuple(layers)


def _layer(run: LayerProfile, scale: float) -> Layer:
    return Layer(
        flops=run.flops_per_sample,
        attached_flops=0.0,
        parameters=run.parameters,
        unit_parameters=run.parameters,
        activation_bytes=round(run.activation_bytes_per_sample * scale),
        replicated_bytes=round(run.replicated_activation_bytes_per_sample * scale),
        boundary_bytes=round(run.boundary_bytes_per_sample * scale),
        attached_bytes=0,
        heads=run.heads,
        tensor_messages=run.tensor_messages,
    )


def _attach(layer: Layer, flops: float, parameters: int, kept_bytes: int) -> Layer:
    return replace(
        layer,
        attached_flops=layer.attached_flops + flops,
        parameters=layer.parameters + parameters,
        unit_parameters=max(layer.unit_parameters, parameters),
        attached_bytes=layer.attached_bytes + kept_bytes,
    )
