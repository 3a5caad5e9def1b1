"""From a layout to the parts of the model that this rank holds, each layer spread as its strategy says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # see above
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
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
from scheduler.trainer.layout import Layout, locate_rank
from scheduler.trainer.mesh import LayerMeshes, Meshes
from scheduler.trainer.mixture_of_experts import MixtureOfExperts, shard_experts
from scheduler.trainer.model import Block, Embedding, Gpt, GptSize, build_gpt

# torch exports it; its type stubs only forget to say so.


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The layers of one pipeline stage. `module` is `model` as it is run: the same, or wrapped."""

    stage: int
    model: Gpt
    module: nn.Module


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What model it is, where this rank stands, and how many blocks at the front are frozen (their embedding too).

    `is_blank`: its weights will be loaded, so that none are drawn.
    """

    size: GptSize
    rank: int
    device: str
    seed: int = 0
    dtype: torch.dtype = torch.float32
    frozen_blocks: int = 0
    for_loading: bool = False


def build_model_parts(layout: Layout, meshes: Meshes, options: BuildOptions) -> tuple[ModelPart, ...]:
    """One part for each stage that runs on this rank's group. Collective over all ranks.

    Gradients come out summed over the ranks, not averaged: the loss of each is its share of the global batch's.

    Raises:
        ValueError: the model's heads or its sequence do not divide as the layout asks.
    """
    validate_divisibility(layout, options.size)
    # Nothing changes the outputs of a layer in place, which is what FSDP warns of where they are views (DTensor's).
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    spreads = compute_token_shardings(layout, options.size.sequence)
    parts = []
    for stage in layout.stages_on_rank(options.rank):
        seed = None if options.for_loading else options.seed
        model = build_gpt(options.size, seed=seed, dtype=options.dtype, layers=layout.stages[stage]).to(options.device)
        _connect_layers(model, layout, spreads, meshes, options)
        _freeze_blocks(model, options.frozen_blocks)
        parts.append(ModelPart(stage, model, _parallelize(model, layout, meshes)))
    return tuple(parts)


def validate_divisibility(layout: Layout, size: GptSize) -> None:
    """
    Raises:
        ValueError: the model's heads or its sequence do not divide as the layout asks.
    """
    for strategy in layout.strategies:
        split = strategy.tp * strategy.ulysses
        if size.heads % split:
            raise ValueError(f"tp x ulysses is {split}, it must divide the model's {size.heads} heads")
        share = size.sequence // (strategy.ulysses * strategy.ring)
        if strategy.sequence_sharding and share % strategy.tp:
            raise ValueError(f"tp is {strategy.tp}, with sequence_sharding it must divide a rank's {share} tokens")


@contextmanager
def gradient_sync(module: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Gradients are summed over the ranks inside only where wanted: once a step, in its last micro-batch."""
    if isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
    yield


def _connect_layers(
    model: Gpt, layout: Layout, shardings: tuple[TokenSharding, ...], meshes: Meshes, options: BuildOptions
) -> None:
    """Each layer gets its own cells from the one before, and attends over its own context ranks."""
    rank = layout.rank_in_group(options.rank)
    for number, have, want in find_sharding_changes(model.layer_range, layout, shardings):
        if have is not want:
            model.input_transforms[number] = TokenRedistribution(have, want, rank=rank, group=meshes.stage_group)
    for number, piece in model.numbered_layers():
        strategy, mesh = layout.strategies[number], meshes.layers[number]
        if isinstance(piece, Embedding):
            index = locate_rank(strategy, rank).context_index(strategy)
            piece.token_positions = compute_token_positions(
                tokens=options.size.sequence, ulysses=strategy.ulysses, ring=strategy.ring, index=index
            ).to(options.device)
        elif isinstance(piece, Block):
            piece.recompute = strategy.recompute
            if strategy.ulysses * strategy.ring > 1:
                piece.attention.attend = partial(context_attention, groups=ContextGroups(mesh.ulysses, mesh.ring))


def _freeze_blocks(model: Gpt, frozen_blocks: int) -> None:
    for number, piece in model.numbered_layers():
        if frozen_blocks and number <= frozen_blocks:
            piece.requires_grad_(False)


def _parallelize(model: Gpt, layout: Layout, meshes: Meshes) -> nn.Module:
    if layout.uses_ddp:
        return _wrap_ddp(model) if layout.world_size > 1 else model
    for number, piece in model.numbered_layers():
        strategy, mesh = layout.strategies[number], meshes.layers[number]
        if strategy.tp > 1:
            learns = any(parameter.requires_grad for parameter in piece.parameters())
            # Nothing is sent: all ranks begin with the same weights.
            parallelize_module(piece, mesh.tensor, dict(_tensor_parallel_styles(piece, strategy)), src_data_rank=None)
            # Of what it replicates torch makes new parameters, which learn even where the old ones were frozen.
            piece.requires_grad_(learns)
        if isinstance(piece, Block) and isinstance(piece.feed_forward, MixtureOfExperts):
            _shard_experts(piece.feed_forward, strategy, mesh)
        _apply_fsdp(piece, strategy, mesh.data)
    # The part itself holds no parameter: as a root it tells all its layers at once when to sum gradients.
    fully_shard(model, mesh=meshes.layers[model.layer_range.start].data["shard"])
    return model


def _shard_experts(experts: MixtureOfExperts, strategy: LayerStrategy, mesh: LayerMeshes) -> None:
    """Over the ranks of ep and tp; what is left of the replicas holds copies or shards of each."""
    if strategy.ep > 1 or strategy.tp > 1:
        shard_experts(experts, mesh.expert, mesh.tensor)
        data = mesh.expert_data
        _apply_fsdp(experts.experts, strategy, data, placement=_choose_expert_placement(data["shard"].size()))


def _choose_expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard]:
    """Shards cut each expert where they come out equal, else the stack of them: only there FSDP2 has unequal ones."""

    def placement(weight: nn.Parameter) -> Shard:
        assert isinstance(weight, DTensor)
        return Shard(1 if weight.to_local().shape[1] % ranks == 0 else 0)

    return placement


def _apply_fsdp(
    piece: nn.Module,
    strategy: LayerStrategy,
    mesh: DeviceMesh,
    *,
    placement: Callable[[nn.Parameter], Shard] = lambda _: Shard(0),
) -> None:
    """FSDP2; plain replication is a shard group of one. ZeRO 1 and 2 keep parameters whole between forward and
    backward; gradients are scattered once a step, so that the two are the same here."""
    among = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    sharded = fully_shard(
        piece,
        mesh=among,
        reshard_after_forward=strategy.zero == 3,
        shard_placement_fn=placement,
    )
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _wrap_ddp(model: Gpt) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    # DDP reads the annotations of a hook, and does not understand those that are not evaluated.
    wrapped.register_comm_hook(None, lambda _, bucket: _sum_bucket(bucket))
    return wrapped


def _sum_bucket(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    summed: torch.futures.Future[torch.Tensor] = (
        dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
    )
    return summed


def _tensor_parallel_styles(piece: nn.Module, strategy: LayerStrategy) -> Iterator[tuple[str, ParallelStyle]]:
    """Megatron's split of each layer: columns, then rows; the embedding and the head by vocabulary."""
    if isinstance(piece, Embedding):
        yield "tokens", RowwiseParallel(input_layouts=Replicate())
    elif isinstance(piece, Block):
        dense = not isinstance(piece.feed_forward, MixtureOfExperts)
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
        # Experts are split by `spread_experts`: each rank gives its term of their sum.
        styles["feed_forward"] = PrepareModuleInputOutput(
            input_layouts=(between,),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Partial(),),
            desired_output_layouts=(between,),
        )
        return styles
    styles |= {"feed_forward.0": ColwiseParallel(), "feed_forward.2": RowwiseParallel(output_layouts=between)}
    return styles | ({"feed_forward": gathered} if sequence_sharding else {})
