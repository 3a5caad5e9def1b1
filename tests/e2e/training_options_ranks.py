"""A rank that trains a few steps with one set of options under each of many plans, and records the losses.

`main(FOLDER, RANK, RANKS, OPTIONS, ONLY)` trains under all plans for this number of ranks with ONLY in their names. It
writes the losses by plan to `FOLDER/found-RANK.json`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName
from scheduler.trainer.engine import TrainingEngine
from scheduler.trainer.layout import build_layout
from scheduler.trainer.model import get_model_size
from scheduler.trainer.optimizer import OptimizerName
from scheduler.trainer.settings import Autocast, TrainerSettings
from tests.e2e.rank_launcher import make_plan

BATCH = 12
STEPS = 6
L = LayerStrategy


def plan(*stages: tuple[LayerStrategy, ...], micro_batches: int = 1, interleave: int = 1) -> ParallelPlan:
    return make_plan(*stages, batch=BATCH, micro_batches=micro_batches, interleave=interleave)


STREAMED: dict[str, Any] = {
    "offload": True,
    "offload_parameters": True,
    "offload_activations": True,
    "recompute": Recompute.FULL,
}
GPIPE = Schedule(ScheduleName.GPIPE)
PLANS = {
    "one": plan((L(1),)),
    "dp2": plan((L(2, dp=2),), micro_batches=2),
    "tp2": plan((L(2, tp=2, recompute=Recompute.SELECTIVE),)),
    "tp2 by tokens": plan((L(2, tp=2, sequence_sharding=True, recompute=Recompute.FULL),), micro_batches=2),
    "pp2": plan((L(1),), (L(1),), micro_batches=3),
    "pp2, GPipe": replace(plan((L(1),), (L(1),), micro_batches=3), schedule=GPIPE),
    "pp2 interleaved": plan((L(1),), (L(1),), (L(1),), (L(1),), micro_batches=2, interleave=2),
    "zero1 over dp2": plan((L(2, dp=2, zero=1, shard_group=2, offload=True),)),
    "zero3 over dp2": plan((L(2, dp=2, zero=3, shard_group=2, recompute=Recompute.FULL),), micro_batches=2),
    "streamed over dp2": plan((L(2, **STREAMED, dp=2, zero=3, shard_group=2),), micro_batches=2),
    "streamed over tp2": plan((L(2, **STREAMED, tp=2, sequence_sharding=True),)),
    "streamed, pp2": plan((L(1, **STREAMED),), (L(1),), micro_batches=3),
    "experts: streamed over ep2": plan((L(2, **STREAMED, dp=2, ep=2, zero=3, shard_group=2),), micro_batches=2),
    "streamed to one": plan((L(1, **STREAMED), L(1))),
    "ulysses2": plan((L(2, ulysses=2),), micro_batches=2),
    "ring2": plan((L(2, ring=2, zero=3, shard_group=2),)),
    "unlike layers": plan((L(1, tp=2), L(1, dp=2, zero=3, shard_group=2)), micro_batches=2),
    "experts: one": plan((L(1),)),
    "experts: ep2": plan((L(2, dp=2, ep=2),), micro_batches=2),
    "experts: tp2 by tokens": plan((L(2, tp=2, sequence_sharding=True),)),
    "tp2 x hybrid zero3": plan((L(2, tp=2, dp=4, zero=3, shard_group=2, sequence_sharding=True),)),
    "dp2 to tp2 by tokens": plan((L(1, dp=2),), (L(1, tp=2, sequence_sharding=True),), micro_batches=3),
    "experts: ep2 x tp2 sharded": plan((L(2, tp=2, dp=2, ep=2, zero=3, shard_group=2, sequence_sharding=True),)),
    "experts: ep2 to one": plan((L(1, dp=2, ep=2),), (L(1),), micro_batches=3),
}
SETTINGS = {
    "together": TrainerSettings(dropout=0.2, clip_norm=0.5, optimizer=OptimizerName.MUON, learning_rate=3e-3),
    "clip": TrainerSettings(clip_norm=0.5, learning_rate=3e-3),
    "dropout": TrainerSettings(dropout=0.2, learning_rate=3e-3),
    "sgd": TrainerSettings(optimizer=OptimizerName.SGD, clip_norm=1.0, learning_rate=0.1),
    "muon": TrainerSettings(optimizer=OptimizerName.MUON, learning_rate=3e-3),
    "bf16": TrainerSettings(autocast=Autocast.BF16, clip_norm=0.5, learning_rate=3e-3),
    "fp16": TrainerSettings(autocast=Autocast.FP16, dropout=0.1, learning_rate=3e-3),
    "compile": TrainerSettings(compile_backend="aot_eager", dropout=0.1, clip_norm=1.0, learning_rate=3e-3),
}
"""In float64 the options can be told from rounding; autocast needs float32."""


def settings_of(options: str, case: str) -> TrainerSettings:
    chosen = SETTINGS[options]
    dtype = "float64" if chosen.autocast is Autocast.NONE else "float32"
    return replace(chosen, model="nano-moe" if case.startswith("experts") else "nano-gpt", seed=1, dtype=dtype)


def cases(ranks: int, only: str = "") -> dict[str, ParallelPlan]:
    return {name: each for name, each in PLANS.items() if each.world_size == ranks and only in name}


def train(settings: TrainerSettings, chosen: ParallelPlan, *, device: str = "cpu") -> list[float]:
    """Return the training losses of all steps, and then the loss of an evaluation."""
    layout = build_layout(chosen, world_size=dist.get_world_size(), block_count=get_model_size(settings.model).layers)
    engine = TrainingEngine(settings, layout, rank=dist.get_rank(), device=device)
    engine.build()
    losses = [
        engine.run_step(step * BATCH, learning_rate=settings.learning_rate * (step + 1) / STEPS)
        for step in range(STEPS)
    ]
    return [*losses, engine.evaluate()]


def main(folder: Path, rank: int, ranks: int, options: str, only: str = "") -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {case: train(settings_of(options, case), chosen) for case, chosen in cases(ranks, only).items()}
    part = folder / f"found-{rank}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / f"found-{rank}.json")
    # No rank leaves while another still waits for its messages.
    dist.barrier()
