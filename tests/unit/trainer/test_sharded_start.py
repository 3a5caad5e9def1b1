"""The start of a sharded training: initial weights, memory, and which rank counts which gradient."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.gradients import GlobalGradients
from scheduler.trainer.layout import build_layout
from scheduler.trainer.local_shards import find_local_region, get_local_tensor
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import SIZES, GptSize, build_gpt, build_meta_gpt
from scheduler.trainer.model_parts import BuildOptions, ModelPart, build_model_parts
from tests.unit.trainer.test_layout import plan_of
from tests.unit.trainer.test_training_state import as_rank

L = LayerStrategy
PLANS = {
    "dp2": ((L(2, dp=2),),),
    "zero1": ((L(2, dp=2, zero=1, shard_group=2),),),
    "tp2": ((L(2, tp=2),),),
    "tp2 by tokens x hybrid zero3": ((L(2, tp=2, dp=4, zero=3, shard_group=2, sequence_sharding=True),),),
    "ring2 x ulysses2, zero3": ((L(2, ring=2, ulysses=2, zero=3, shard_group=4),),),
    "unlike layers": ((L(1, tp=2, dp=2), L(1, dp=4, zero=3, shard_group=4)),),
    "dp2 to tp2": ((L(1, dp=2),), (L(1, tp=2, sequence_sharding=True),)),
    "experts: ep2": ((L(2, dp=4, ep=2),),),
    "experts: ep2 x tp2 sharded": ((L(2, tp=2, dp=2, ep=2, zero=3, shard_group=2),),),
    "experts: ep2, unequal shards": ((L(2, dp=6, ep=2, zero=3, shard_group=6),),),
}


@pytest.mark.parametrize("case", PLANS)
def test_every_rank_starts_with_its_part_of_one_model_and_each_element_is_counted_once(case: str) -> None:
    size = SIZES["nano-moe" if case.startswith("experts") else "nano-gpt"]
    plan, whole = plan_of(*PLANS[case]), dict(build_gpt(size, seed=3, dtype=torch.float32).named_parameters())
    counted = {name: torch.zeros(parameter.shape, dtype=torch.int64) for name, parameter in whole.items()}
    for rank in range(plan.world_size):
        with as_rank(rank, plan.world_size):
            layout = build_layout(plan, world_size=plan.world_size, block_count=size.layers)
            parts = build_model_parts(layout, build_meshes(layout, device="cpu"), BuildOptions(size, rank, "cpu", 3))
            of_rank = {id(each) for each in GlobalGradients(parts, layout, rank=rank).counted}
            for name, parameter in (named for part in parts for named in part.model.named_parameters()):
                region = find_local_region(parameter)
                assert torch.equal(get_local_tensor(parameter), whole[name][region]), name
                counted[name][region] += id(parameter) in of_rank
    assert {name for name, times in counted.items() if not (times == 1).all()} == set()


def test_rank_whose_layers_are_frozen_sums_gradients_on_the_device_of_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL sums tensors of GPUs only."""
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", summed.append)
    model = build_meta_gpt(SIZES["nano-gpt"], dtype=torch.float32).requires_grad_(False)
    layout = build_layout(plan_of((L(1),)), world_size=1, block_count=2)
    GlobalGradients([ModelPart(0, model, model)], layout, rank=0).compute_norm()
    assert [each.device.type for each in summed] == ["meta"]


LARGE = GptSize(layers=4, hidden=768, heads=4, vocabulary=256, sequence=64)
RANKS = 8


def measure_build() -> None:
    """Print by how many bytes building one of `RANKS` ranks raises the peak memory of this process."""
    plan = plan_of((L(LARGE.layers, dp=RANKS, zero=3, shard_group=RANKS),), micro_batch_size=RANKS)
    with as_rank(1, RANKS):
        layout = build_layout(plan, world_size=RANKS, block_count=LARGE.layers)
        meshes = build_meshes(layout, device="cpu")
        # The first build, of a small model, loads what torch loads lazily.
        build_model_parts(layout, meshes, BuildOptions(replace(LARGE, hidden=32), 1, "cpu"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        build_model_parts(layout, meshes, BuildOptions(LARGE, 1, "cpu"))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


@pytest.mark.full
def test_one_rank_never_holds_the_whole_model() -> None:
    """One of eight ranks of a model of 116 MB."""
    code = "from tests.unit.trainer.test_sharded_start import measure_build; measure_build()"
    root = Path(__file__).parents[3]
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=300
    )
    whole_bytes = 4 * sum(
        prod(parameter.shape) for parameter in build_meta_gpt(LARGE, dtype=torch.float32).parameters()
    )
    assert int(completed.stdout) < 0.4 * whole_bytes
