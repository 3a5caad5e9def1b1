"""The cost of an iteration of a serving replica, and the limits of its batch.

A replica batches continuously (Orca, OSDI'22, section 3.2; vLLM, arXiv 2309.06180): each iteration computes one token
of every running request, and chunks of prompts in what is left of the token budget (Sarathi-Serve, arXiv 2403.02310).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import ModelProfile

VALUE_BYTES = 2
"""Bytes of a weight, a cached value and an activation in bf16 and fp16."""
ENGINE_OVERHEAD_S = 0.002
"""Time of the engine between iterations: scheduling, sampling and the copy of token ids.

Measured by vLLM 0.8.5 on Llama 3 8B: 10.6 ms per token on an H100 PCIe that reads the weights in 8.0 ms at its
datasheet's 2,000 GB/s (github.com/IOG-Foundation/llm-inference-benchmarks)."""
ACTIVATION_SHARE = 0.03
"""Share of the memory for activations of a full batch and captured graphs."""
COLLECTIVE_LATENCY_S = 12e-6
"""Start of an all-reduce of a few rows over NVLink by the kernels of an engine, which avoid NCCL's launch."""


@dataclass(frozen=True, slots=True)
class IterationCosts:
    """Seconds of one iteration: a sum over the parts of its batch.

    Attributes:
        base_s: reading the weights, launches and collectives, whatever the batch.
        prefill_token_s: one token of a prompt.
        attention_pair_s: one token of a prompt and one token before it that it attends to.
        decode_sequence_s: one running request.
        kv_token_s: one cached token that a running request reads.
    """

    base_s: float
    prefill_token_s: float
    attention_pair_s: float
    decode_sequence_s: float
    kv_token_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            required = field.name in ("base_s", "prefill_token_s")
            if not (isfinite(value) and value >= 0) or (required and value == 0):
                bound = "above 0" if required else "of at least 0"
                raise ValueError(f"`{field.name}` is {value}. Use a finite number of seconds {bound}.")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of the batch of one replica, each at least 1.

    `batched_tokens` of one iteration (prompt chunks and running requests together), `sequences` that run at once, and
    `kv_tokens` that the KV cache holds.
    """

    batched_tokens: int
    sequences: int
    kv_tokens: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"`{field.name}` is {getattr(self, field.name)}. Use a whole number of at least 1.")
        if self.sequences >= self.batched_tokens:
            raise ValueError(
                f"`sequences` is {self.sequences}, but `batched_tokens` is {self.batched_tokens}. "
                f"Set `sequences` to {self.batched_tokens - 1} or less, so that prompts find room in an iteration."
            )


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """A replica on `gpus` GPUs."""

    costs: IterationCosts
    limits: BatchLimits
    gpus: int


def derive_costs(model: ModelProfile, hardware: HardwareProfile, tensor_degree: int) -> IterationCosts:
    """Return the costs of an iteration by a roofline over the profiles.

    Weights and cached values are read at the profile's memory bandwidth, which bounds decoding. Prompts are bound by
    matrix products. All experts of a mixture count as read in each iteration, and `experts_per_token` of them as
    computed. Tensor parallelism adds its all-reduces: a start in `base_s`, and the activations of each token.
    """
    flops = hardware.peak_flops_per_s * hardware.efficiency * tensor_degree
    attention = hardware.peak_flops_per_s * (hardware.attention_efficiency or hardware.efficiency) * tensor_degree
    bandwidth = hardware.memory_bandwidth_bytes_per_s * tensor_degree
    token_flops = sum(run.layers * run.flops_per_sample / run.tokens_per_sample for run in model.layers)
    pairs = model.sequence_length**2 / 2
    pair_flops = sum(run.layers * run.attention_flops_per_sample for run in model.layers) / pairs
    messages = sum(run.layers * run.tensor_messages for run in model.layers) if tensor_degree > 1 else 0
    boundary = max(run.boundary_bytes_per_sample / run.tokens_per_sample for run in model.layers)
    ring = 2 * (tensor_degree - 1) / tensor_degree
    token_message_s = messages * ring * boundary / hardware.intra_bandwidth_bytes_per_s
    return IterationCosts(
        base_s=ENGINE_OVERHEAD_S + _count_read_bytes(model) / bandwidth + messages * COLLECTIVE_LATENCY_S,
        prefill_token_s=token_flops / flops + token_message_s,
        attention_pair_s=pair_flops / attention,
        decode_sequence_s=(token_flops + model.head.flops_per_sample / model.sequence_length) / flops + token_message_s,
        kv_token_s=count_kv_bytes(model, tensor_degree) / bandwidth * tensor_degree,
    )


def _count_read_bytes(model: ModelProfile) -> int:
    """Return the bytes of weights that an iteration reads; of the embedding it reads only a few rows."""
    layers = sum(run.layers * run.parameters for run in model.layers)
    return VALUE_BYTES * (layers + model.head.parameters)


def count_kv_bytes(model: ModelProfile, tensor_degree: int) -> float:
    """Return the bytes of one cached token on one GPU: keys and values of the heads that the GPU holds.

    Raises:
        ValueError: the profile does not state the width of an attention head.
    """
    if any(run.head_width == 0 for run in model.layers):
        raise ValueError(f"model {model.name!r} states no `head_width`, so the size of its KV cache is unknown.")
    split = [max(run.heads / tensor_degree, 1.0) for run in model.layers]
    return sum(
        run.layers * 2 * VALUE_BYTES * heads * run.head_width for run, heads in zip(model.layers, split, strict=True)
    )


def count_kv_tokens(model: ModelProfile, hardware: HardwareProfile, tensor_degree: int, memory_share: float) -> int:
    """Return the tokens that the KV cache of a replica holds.

    Args:
        memory_share: part of a GPU's memory that the engine uses (vLLM's `gpu_memory_utilization`).

    Raises:
        ValueError: the weights alone do not fit.
    """
    embedding = 0 if model.tied_embedding else model.embedding.parameters
    weights = (_count_read_bytes(model) + VALUE_BYTES * embedding) / tensor_degree
    usable = hardware.memory_bytes * (memory_share - ACTIVATION_SHARE)
    if (tokens := int((usable - weights) / count_kv_bytes(model, tensor_degree))) < 1:
        need = weights / hardware.memory_bytes + ACTIVATION_SHARE
        raise ValueError(
            f"`tensorDegree` is {tensor_degree}, but the weights of {model.name} need {need:.2f} times the memory of "
            f"one {hardware.gpu}. Use a larger degree or a GPU with more memory."
        )
    return tokens
