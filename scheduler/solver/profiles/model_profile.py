"""ModelProfile: what the solver must know about a model, in runs of equal layers."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.solver.profiles.profile_error import ProfileError, require_not_negative, require_positive

REFERENCE_VALUE_BYTES = 2
"""Activation figures of a profile are given for values of two bytes (bf16); other precisions scale them."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """A run of `layers` equal layers; every figure is for one layer and one sample, activations at two bytes a value.

    Attributes:
        flops_per_sample: forward pass alone; the backward pass counts twice this.
        parameters: weights of one layer.
        activation_bytes_per_sample: kept for the backward pass and split by tensor parallelism.
        replicated_activation_bytes_per_sample: kept, but held in full by each tensor-parallel rank (norms, masks).
        boundary_bytes_per_sample: the layer's output, handed to the next one; its input is taken to be as large.
            It is all that full recompute keeps.
        heads: the tensor-parallel degree must divide it.
        tensor_messages: all-reduces of the boundary in one forward pass; the backward pass has as many.
    """

    layers: int
    flops_per_sample: float
    parameters: int
    activation_bytes_per_sample: int
    replicated_activation_bytes_per_sample: int
    boundary_bytes_per_sample: int
    heads: int = 1
    tensor_messages: int = 2

    def __post_init__(self) -> None:
        require_positive(
            "layer profile",
            layers=self.layers,
            flops_per_sample=self.flops_per_sample,
            parameters=self.parameters,
            activation_bytes_per_sample=self.activation_bytes_per_sample,
            boundary_bytes_per_sample=self.boundary_bytes_per_sample,
            heads=self.heads,
        )
        require_not_negative(
            "layer profile",
            replicated_activation_bytes_per_sample=self.replicated_activation_bytes_per_sample,
            tensor_messages=self.tensor_messages,
        )


@dataclass(frozen=True, slots=True)
class Attachment:
    """What the embedding adds to the first layer, or the head with the loss to the last one.

    Both follow the strategy of the layer they are attached to. Recompute never repeats them.
    """

    flops_per_sample: float = 0.0
    parameters: int = 0
    activation_bytes_per_sample: int = 0

    def __post_init__(self) -> None:
        require_not_negative(
            "embedding or head",
            flops_per_sample=self.flops_per_sample,
            parameters=self.parameters,
            activation_bytes_per_sample=self.activation_bytes_per_sample,
        )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A chain of layers, with an embedding attached to the first and a head attached to the last.

    Layers are counted from 0 over the transformer layers alone. `tied_embedding` says that the head reuses the
    embedding's weights, so that a plan of one stage holds them once and a plan of several stages twice.
    """

    name: str
    sequence_length: int
    layers: tuple[LayerProfile, ...]
    embedding: Attachment = Attachment()
    head: Attachment = Attachment()
    tied_embedding: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError(f"model {self.name!r}: layers is empty; at least one run of layers is needed")
        require_positive(f"model {self.name!r}", sequence_length=self.sequence_length)

    @property
    def layer_count(self) -> int:
        return sum(run.layers for run in self.layers)

    @property
    def parameters(self) -> int:
        """All distinct weights: a tied head is not counted again."""
        head = 0 if self.tied_embedding else self.head.parameters
        return sum(run.layers * run.parameters for run in self.layers) + self.embedding.parameters + head

    @property
    def flops_per_sample(self) -> float:
        """Forward pass of one sample through the whole model."""
        ends = self.embedding.flops_per_sample + self.head.flops_per_sample
        return sum(run.layers * run.flops_per_sample for run in self.layers) + ends
