"""A rank of a group of four that compares sharded experts with the same experts on one rank.

`main(FOLDER, RANK, RANKS)` runs all cases and writes the results to `FOLDER/found-RANK.json`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim import AdamW

from scheduler.domain.parallel_plan import Recompute
from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import Manifest, TrainingPosition
from scheduler.trainer.mixture_of_experts import MixtureOfExperts, shard_experts
from scheduler.trainer.model import SIZES, Block, Gpt, build_gpt
from scheduler.trainer.training_state import TrainablePart, compute_global_digest

RANKS = 4
HIDDEN, EXPERTS, UNUSED = 8, 4, 1
TOKENS = (7, 0, 12, 5)  # by rank; one rank has none
STEPS = 3
SAVED_AS = "checkpoints"

Found = dict[str, dict[str, float | str]]


def dp_ep_mesh(ep: int) -> DeviceMesh:
    """Return a mesh in which each expert is on one rank. test_plan_gradients covers experts that ranks share."""
    return init_device_mesh("cpu", (RANKS // ep, ep, 1), mesh_dim_names=("dp", "ep", "tp"))


def mixture(experts_per_token: int, dtype: torch.dtype) -> MixtureOfExperts:
    """Return a mixture of experts in which no token of `inputs` chooses the expert UNUSED."""
    module = MixtureOfExperts(hidden=HIDDEN, experts=EXPERTS, experts_per_token=experts_per_token).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        module.router.weight[UNUSED] = -100.0
    return module.to(dtype)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Return the inputs of all ranks: positive, each of shape (1, tokens, hidden)."""
    generator = torch.Generator().manual_seed(2)
    return [torch.rand(1, tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for tokens in TOKENS]


def loss(outputs: Tensor) -> Tensor:
    """Return a sum over tokens that weighs their values differently."""
    return (outputs * torch.linspace(-1, 1, HIDDEN, dtype=outputs.dtype)).sum()


def off(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    if not expected.numel():
        return float(found.numel())
    return ((found - expected).abs().max() / expected.abs().max()).item()


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agreement(ep: int, experts_per_token: int, dtype: torch.dtype, *, sharded: bool) -> dict[str, float | str]:
    """Compare a sharded module with one that has all experts and all tokens; if `sharded`, with FSDP on top."""
    rank, of_all = dist.get_rank(), inputs(dtype)
    alone = mixture(experts_per_token, dtype)
    batch = torch.cat(of_all, dim=1).requires_grad_()
    expected = alone(batch)
    torch.autograd.backward(loss(expected))
    assert batch.grad is not None
    begin = sum(TOKENS[:rank])
    mine = slice(begin, begin + TOKENS[rank])

    spread, mesh = mixture(experts_per_token, dtype), dp_ep_mesh(ep)
    shard_experts(spread, mesh["ep", "tp"], mesh["tp"])
    if sharded:
        shard(spread.experts, mesh["dp"])
        shard(spread, init_device_mesh("cpu", (RANKS,)))
    part = of_all[rank].requires_grad_()
    outputs = spread(part)
    torch.autograd.backward(loss(outputs))
    if not sharded:
        for weight in spread.experts.parameters():
            assert isinstance(weight.grad, DTensor)
            dist.all_reduce(weight.grad.to_local(), group=mesh.get_group("dp"))
        dist.all_reduce(whole(spread.router.weight.grad))
    assert part.grad is not None
    gradients = {name: whole(weight.grad) for name, weight in spread.named_parameters()}
    differences = {name: off(gradients[name], whole(weight.grad)) for name, weight in alone.named_parameters()}
    if experts_per_token == 1:
        # A softmax over one logit is constant.
        differences["router.weight"] = gradients["router.weight"].abs().max().item()
    unused = max(gradients[f"experts.{name}"][UNUSED].abs().max().item() for name in ("up", "down_bias"))
    return {
        "outputs": off(outputs, expected[:, mine]),
        "inputs": off(part.grad, batch.grad[:, mine]),
        "unused": unused,
        **differences,
    }


def spread_gpt(ep: int, *, seed: int, recompute: Recompute = Recompute.NONE) -> tuple[Gpt, AdamW]:
    """Build nano-moe with FSDP: experts over the ranks that have the same ones, everything else over all ranks."""
    model, mesh, everyone = build(seed, recompute), dp_ep_mesh(ep), init_device_mesh("cpu", (RANKS,))
    for block in model.blocks.values():
        assert isinstance(block, Block)
        assert isinstance(block.feed_forward, MixtureOfExperts)
        shard_experts(block.feed_forward, mesh["ep", "tp"], mesh["tp"])
        shard(block.feed_forward.experts, mesh["dp"])
        shard(block, everyone)
    shard(model, everyone)
    return model, optimizer(model)


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Apply FSDP that sums gradients."""
    sharded = fully_shard(module, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def build(seed: int, recompute: Recompute = Recompute.NONE) -> Gpt:
    model = build_gpt(SIZES["nano-moe"], seed=seed, dtype=torch.float64)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.recompute = recompute
    return model


def optimizer(model: Gpt) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(model: Gpt, optimizer: AdamW, samples: slice) -> None:
    """Train STEPS steps on these samples' share of the mean loss over a batch of 8."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        tokens = torch.randint(0, 256, (8, 16), generator=generator)[samples]
        total = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
        torch.autograd.backward(total / (8 * 16))
        optimizer.step()
        optimizer.zero_grad()


def my_samples() -> slice:
    return slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)


def training(ep: int, recompute: Recompute) -> dict[str, float | str]:
    """Compare the weights of a sharded model with those that one rank reaches."""
    alone = build(seed=1)
    train(alone, optimizer(alone), slice(0, 8))
    spread, its_optimizer = spread_gpt(ep, seed=1, recompute=recompute)
    train(spread, its_optimizer, my_samples())
    pairs = zip(spread.named_parameters(), alone.parameters(), strict=True)
    return {name: off(whole(found), expected) for (name, found), expected in pairs}


def resharding(folder: Path) -> dict[str, float | str]:
    """Return digests of a state saved with ep 4 and of what dp 2 x ep 2 loads of it."""
    root = folder / SAVED_AS
    model, its_optimizer = spread_gpt(4, seed=1)
    train(model, its_optimizer, my_samples())
    facts = Manifest(TrainingPosition(STEPS, 8 * STEPS), dist.get_world_size(), {}, ())
    checkpoint.save(root, [TrainablePart(model, [its_optimizer])], facts, node="t0")
    manifest = checkpoint.find_latest(root)
    assert manifest is not None
    other, other_optimizer = spread_gpt(2, seed=2)
    before = digest(other, other_optimizer)
    checkpoint.load(root, manifest, [TrainablePart(other, [other_optimizer])], settings={}, node="t0")
    return {
        "saved": digest(model, its_optimizer),
        "before": before,
        "loaded": digest(other, other_optimizer),
    }


def digest(model: Gpt, optimizer: AdamW) -> str:
    return compute_global_digest([TrainablePart(model, [optimizer])])


def cases(folder: Path) -> Found:
    found: Found = {}
    for dtype in (torch.float32, torch.float64):
        for ep in (1, 2, 4):
            for sharded in (False, True):
                for chosen in (1, 2):
                    name = f"{str(dtype).removeprefix('torch.')} ep{ep} top{chosen} {'fsdp' if sharded else 'plain'}"
                    found[name] = agreement(ep, chosen, dtype, sharded=sharded)
    for ep in (2, 4):
        found[f"training ep{ep}"] = training(ep, Recompute.FULL if ep == 2 else Recompute.NONE)
    found["resharding"] = resharding(folder)
    return found


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    # Silences the warning that a gather over two sharded dimensions takes two steps.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = cases(folder)
    part = folder / f"found-{rank}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / f"found-{rank}.json")
    # No rank leaves while another still waits for its messages.
    dist.barrier()
