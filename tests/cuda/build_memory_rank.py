"""A rank that builds a model on the GPU and reports the memory that this took.

`python -m tests.cuda.build_memory_rank sharded|whole` prints a JSON object. `sharded` is one rank of `RANKS` in a fake
process group, `whole` is a lone rank.
"""

from __future__ import annotations

import json
import sys
from math import prod

import torch

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.layout import Layout, build_layout
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import GptSize, build_meta_gpt
from scheduler.trainer.model_parts import BuildOptions, ModelPart, build_model_parts
from scheduler.trainer.optimizer import build_optimizers
from tests.unit.trainer.test_layout import plan_of
from tests.unit.trainer.test_training_state import as_rank

SIZE = GptSize(layers=8, hidden=1024, heads=8, vocabulary=256, sequence=64)
RANKS = 8
DEVICE = "cuda:0"
L = LayerStrategy


def _build(layout: Layout, rank: int, *, for_loading: bool) -> tuple[ModelPart, ...]:
    options = BuildOptions(SIZE, rank, DEVICE, for_loading=for_loading)
    return build_model_parts(layout, build_meshes(layout, device=DEVICE), options)


def _make_layout(strategy: LayerStrategy) -> Layout:
    plan = plan_of((strategy,), micro_batch_size=RANKS)
    return build_layout(plan, world_size=plan.world_size, block_count=SIZE.layers)


def _read_peak() -> int:
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def measure_sharded() -> dict[str, int]:
    with as_rank(1, RANKS):
        layout = _make_layout(L(1, dp=RANKS, zero=3, shard_group=RANKS))
        parts = _build(layout, 1, for_loading=False)
        held = torch.cuda.memory_allocated()
        assert len(parts) == 1
        return {"ranks": RANKS, "held_bytes": held, "peak_bytes": _read_peak()}


def measure_whole() -> dict[str, int]:
    with as_rank(0, 1):
        layout = _make_layout(L(1))
        parts = _build(layout, 0, for_loading=False)
        held, peak = torch.cuda.memory_allocated(), _read_peak()
        del parts
        torch.cuda.reset_peak_memory_stats()
        [part] = _build(layout, 0, for_loading=True)
        optimizers = build_optimizers(part, layout, learning_rate=1e-3, for_loading=True)
        assert optimizers
        return {"ranks": 1, "held_bytes": held, "peak_bytes": peak, "loading_peak_bytes": _read_peak()}


def main(kind: str) -> None:
    torch.set_num_threads(4)
    torch.cuda.set_device(0)
    torch.zeros(1, device=DEVICE)
    whole = 4 * sum(prod(each.shape) for each in build_meta_gpt(SIZE, dtype=torch.float32).parameters())
    found = {"sharded": measure_sharded, "whole": measure_whole}[kind]()
    print(json.dumps({**found, "whole_bytes": whole}))


if __name__ == "__main__":
    main(sys.argv[1])
