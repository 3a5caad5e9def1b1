"""Build the model parts of this rank and parallelize each layer according to its strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.activation_sharding import (
    TokenRedistribution,
    TokenSharding,
    compute_token_shardings,
    find_sharding_changes,
)
from scheduler.trainer.context_parallel import ContextGroups, compute_token_positions, context_attention
from scheduler.trainer.counter_random import derive_key
from scheduler.trainer.dropout import MicroBatchTokens, TokenDropout
from scheduler.trainer.layout import Layout, locate_rank
from scheduler.trainer.mesh import LayerMeshes, Meshes
from scheduler.trainer.mixture_of_experts import MixtureOfExperts, shard_experts
from scheduler.trainer.model import Block, Embedding, Gpt, GptSize, build_meta_gpt, compile_blocks, initialize_weights

_STREAMED = "streams_parameters"
"""Attribute of an FSDP module: its parameters are in host memory."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The layers of one pipeline stage. `module` is `model`, possibly wrapped; forward passes run it."""

    stage: int
    model: Gpt
    module: nn.Module


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of `build_model_parts`.

    Attributes:
        rank: this rank, of all ranks.
        dtype: precision of the weights, the residual stream and the gradients.
        compute_dtype: half precision of matrix products and attention; None means `dtype`.
        dropout: probability of dropping an element of the embedding's output and of each branch of a trained block.
        compile_backend: backend of torch.compile for the blocks; empty runs them eagerly.
        frozen_blocks: number of frozen blocks, from the front; the embedding freezes with the first.
        for_loading: the weights are loaded afterwards, so none are initialized.
    """

    size: GptSize
    rank: int
    device: str
    seed: int = 0
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    dropout: float = 0.0
    compile_backend: str = ""
    frozen_blocks: int = 0
    for_loading: bool = False


def build_model_parts(layout: Layout, meshes: Meshes, options: BuildOptions) -> tuple[ModelPart, ...]:
    """Build one part for each stage that runs on this rank's pipeline group. Collective over all ranks.

    The model is cut into this rank's shards before any of it has memory, so no rank ever holds more than its shards.
    Gradients are summed over the ranks, not averaged, because each rank's loss is its share of the global batch's
    mean.

    Raises:
        ValueError: the layout does not divide the model's heads or sequence.
    """
    validate_divisibility(layout, options.size)
    # FSDP warns of in-place changes of outputs that are views (DTensors). This model makes none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    shardings = compute_token_shardings(layout, options.size.sequence)
    parts = []
    for stage in layout.stages_on_rank(options.rank):
        model = build_meta_gpt(options.size, dtype=options.dtype, layers=layout.stages[stage])
        model.compute_dtype = options.compute_dtype
        _connect_layers(model, layout, shardings, meshes, options)
        _freeze_blocks(model, options.frozen_blocks)
        _connect_dropout(model, layout, shardings, options)
        if options.compile_backend:
            compile_blocks(model, backend=options.compile_backend)
        if not layout.uses_ddp:
            _shard(model, layout, meshes, options)
        _allocate_weights(model, layout, options.device)
        if not options.for_loading:
            initialize_weights(model, options.size, seed=options.seed)
        # DDP cannot wrap a model without memory. Every rank holds all weights anyway.
        parts.append(ModelPart(stage, model, _wrap_ddp(model) if layout.uses_ddp and layout.world_size > 1 else model))
    return tuple(parts)


def _allocate_weights(model: Gpt, layout: Layout, device: str) -> None:
    """Allocate each layer's shards on the device, or on the host if they are streamed from there."""
    for number, layer in model.numbered_layers():
        layer.to_empty(device="cpu" if layout.strategies[number].offload_parameters else device)


def validate_divisibility(layout: Layout, size: GptSize) -> None:
    """Check that the layout divides the model's heads and sequence.

    Raises:
        ValueError: it does not.
    """
    for strategy in layout.strategies:
        split = strategy.tp * strategy.ulysses
        if size.heads % split:
            raise ValueError(f"`tp` x `ulysses` is {split}. It must divide the model's {size.heads} heads.")
        share = size.sequence // (strategy.ulysses * strategy.ring)
        if strategy.sequence_sharding and share % strategy.tp:
            raise ValueError(f"`tp` is {strategy.tp}. With `sequence_sharding` it must divide a rank's {share} tokens.")


@contextmanager
def gradient_sync(module: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Enable or disable the sum of gradients over ranks. It runs once per step, in the last micro-batch.

    Gradients of streamed layers are summed in each micro-batch, since they are accumulated on the host.
    """
    if isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        for layer in module.modules():
            if isinstance(layer, FSDPModule) and getattr(layer, _STREAMED, False):
                layer.set_requires_gradient_sync(True, recurse=False)
    yield


def _connect_layers(
    model: Gpt, layout: Layout, shardings: tuple[TokenSharding, ...], meshes: Meshes, options: BuildOptions
) -> None:
    """Have each layer redistribute its input and attend over its context-parallel ranks."""
    rank = layout.rank_in_group(options.rank)
    for number, current, target in find_sharding_changes(model.layer_range, layout, shardings):
        if current is not target:
            redistribution = TokenRedistribution(current, target, rank=rank, group=meshes.stage_group)
            model.input_transforms[number] = redistribution
    for number, layer in model.numbered_layers():
        strategy, mesh = layout.strategies[number], meshes.layers[number]
        if isinstance(layer, Embedding):
            index = locate_rank(strategy, rank).context_index(strategy)
            layer.token_positions = compute_token_positions(
                tokens=options.size.sequence, ulysses=strategy.ulysses, ring=strategy.ring, index=index
            ).to(options.device)
        elif isinstance(layer, Block):
            layer.recompute = strategy.recompute
            layer.offloads_inputs = strategy.offload_activations
            if strategy.ulysses * strategy.ring > 1:
                layer.attention.attend = partial(context_attention, groups=ContextGroups(mesh.ulysses, mesh.ring))


def _freeze_blocks(model: Gpt, frozen_blocks: int) -> None:
    for number, layer in model.numbered_layers():
        if frozen_blocks and number <= frozen_blocks:
            layer.requires_grad_(False)


def _connect_dropout(model: Gpt, layout: Layout, shardings: tuple[TokenSharding, ...], options: BuildOptions) -> None:
    """Give each trained layer its dropout. Frozen layers have none, so that their outputs can be stored."""
    if not options.dropout:
        return
    model.token_numbers = MicroBatchTokens(
        model.layer_range,
        layout,
        shardings,
        rank=layout.rank_in_group(options.rank),
        sequence=options.size.sequence,
        device=options.device,
    )
    for number, layer in model.numbered_layers():
        is_frozen = bool(options.frozen_blocks) and number <= options.frozen_blocks
        for name in () if is_frozen else ("dropout", "attention_dropout", "feed_forward_dropout"):
            if hasattr(layer, name):
                setattr(layer, name, TokenDropout(options.dropout, derive_key(options.seed, number, name)))


def _shard(model: Gpt, layout: Layout, meshes: Meshes, options: BuildOptions) -> None:
    """Replace the parameters of each layer by this rank's shards of them."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if options.compute_dtype is not None:
        policy = MixedPrecisionPolicy(options.compute_dtype, reduce_dtype=options.dtype, cast_forward_inputs=False)
    for number, layer in model.numbered_layers():
        strategy, mesh = layout.strategies[number], meshes.layers[number]
        if strategy.tp > 1:
            is_trainable = any(parameter.requires_grad for parameter in layer.parameters())
            # No source rank: all ranks start with the same weights.
            parallelize_module(layer, mesh.tensor, dict(_tensor_parallel_styles(layer, strategy)), src_data_rank=None)
            # torch replaces replicated parameters by new ones, which require gradients even if the old ones did not.
            layer.requires_grad_(is_trainable)
        if isinstance(layer, Block) and isinstance(layer.feed_forward, MixtureOfExperts):
            _shard_experts(layer.feed_forward, strategy, mesh, policy)
        _apply_fsdp(layer, strategy, mesh.data, policy)
    # The model has no parameters of its own. As the FSDP root it switches the gradient sync of all its layers at once.
    fully_shard(model, mesh=meshes.layers[model.layer_range.start].data["shard"], mp_policy=policy)


def _shard_experts(
    experts: MixtureOfExperts, strategy: LayerStrategy, mesh: LayerMeshes, policy: MixedPrecisionPolicy
) -> None:
    """Shard the experts over the ranks of ep and tp, and apply FSDP over the remaining replicas."""
    if strategy.ep > 1 or strategy.tp > 1:
        shard_experts(experts, mesh.expert, mesh.tensor)
        data = mesh.expert_data
        _apply_fsdp(experts.experts, strategy, data, policy, placement=_choose_expert_placement(data["shard"].size()))


def _choose_expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard]:
    """Shard each expert if that gives equal shards, otherwise the stack:

    FSDP2 supports unequal shards in dimension 0 only.
    """

    def placement(weight: nn.Parameter) -> Shard:
        assert isinstance(weight, DTensor)
        return Shard(1 if weight.to_local().shape[1] % ranks == 0 else 0)

    return placement


def _apply_fsdp(
    layer: nn.Module,
    strategy: LayerStrategy,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    *,
    placement: Callable[[nn.Parameter], Shard] = lambda _: Shard(0),
) -> None:
    """Apply FSDP2, with a shard group of one for plain replication.

    ZeRO 1 and 2 keep whole parameters between forward and backward. Gradients are scattered once per step, so 1 and
    2 are the same here. Streamed parameters and their gradients are in host memory.
    """
    is_streamed = strategy.offload_parameters
    sharded = fully_shard(
        layer,
        mesh=mesh if mesh["replicate"].size() > 1 else mesh["shard"],
        reshard_after_forward=strategy.zero == 3 or is_streamed,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if is_streamed else OffloadPolicy(),
        shard_placement_fn=placement,
    )
    setattr(layer, _STREAMED, is_streamed)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _wrap_ddp(model: Gpt) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    # A lambda has no annotations. DDP validates those of a hook and does not support postponed evaluation.
    wrapped.register_comm_hook(None, lambda _, bucket: _sum_bucket(bucket))
    return wrapped


def _sum_bucket(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    summed: torch.futures.Future[torch.Tensor] = (
        dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
    )
    return summed


def _tensor_parallel_styles(layer: nn.Module, strategy: LayerStrategy) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield Megatron's split of each layer: columns, then rows; embedding and head by vocabulary."""
    if isinstance(layer, Embedding):
        yield "tokens", RowwiseParallel(input_layouts=Replicate())
    elif isinstance(layer, Block):
        dense = not isinstance(layer.feed_forward, MixtureOfExperts)
        yield from _block_styles(dense=dense, sequence_sharding=strategy.sequence_sharding).items()
    else:
        yield "project", ColwiseParallel(output_layouts=Replicate())


def _block_styles(*, dense: bool, sequence_sharding: bool) -> Mapping[str, ParallelStyle]:
    between = Shard(1) if sequence_sharding else Replicate()
    styles: dict[str, ParallelStyle] = {
        "attention.project_in": ColwiseParallel(),
        "attention.project_out": RowwiseParallel(output_layouts=between),
    }
    gathered = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    if sequence_sharding:
        styles |= {name: SequenceParallel() for name in ("attention_norm", "feed_forward_norm")}
        styles["attention"] = gathered
    if not dense:
        # `shard_experts` splits the experts, so each rank's output is a term of their sum.
        styles["feed_forward"] = PrepareModuleInputOutput(
            input_layouts=(between,),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Partial(),),
            desired_output_layouts=(between,),
        )
        return styles
    styles |= {"feed_forward.0": ColwiseParallel(), "feed_forward.2": RowwiseParallel(output_layouts=between)}
    return styles | ({"feed_forward": gathered} if sequence_sharding else {})
