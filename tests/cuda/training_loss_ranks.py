"""A rank that trains a few steps on one device and records the losses.

`main(FOLDER, RANK, RANKS, DEVICE, CASE)` writes the losses of the case to `FOLDER/found-RANK.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ebbtide.environment import RankEnvironment
from ebbtide.session import Session
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.trainer.optimizer import OptimizerName
from scheduler.trainer.settings import Autocast, TrainerSettings
from tests.e2e.rank_launcher import make_plan
from tests.e2e.training_options_ranks import BATCH, train

L = LayerStrategy
PLAIN = L(1)


@dataclass(frozen=True, slots=True)
class Case:
    """A training of one rank, and the largest difference of a loss between devices.

    In float64 the difference tells a wrong computation from rounding. In half precision it stems from sums in another
    order.
    """

    settings: TrainerSettings
    tolerance: float
    plan: ParallelPlan


def _make_case(
    tolerance: float,
    strategy: LayerStrategy = PLAIN,
    *,
    micro_batches: int = 1,
    dtype: str = "float64",
    model: str = "nano-gpt",
    **options: object,
) -> Case:
    settings = TrainerSettings(model=model, seed=1, dtype=dtype, learning_rate=3e-3)
    settings = replace(settings, **options)  # type: ignore[arg-type]  # named as the fields are
    return Case(settings, tolerance, make_plan((strategy,), batch=BATCH, micro_batches=micro_batches))


CASES = {
    "float32": _make_case(1e-4, dtype="float32"),
    "float32 muon": _make_case(1e-3, dtype="float32", optimizer=OptimizerName.MUON),
    "float64": _make_case(1e-9),
    "clip": _make_case(1e-9, clip_norm=0.5),
    "dropout": _make_case(1e-9, dropout=0.2),
    "sgd": _make_case(1e-9, optimizer=OptimizerName.SGD, clip_norm=1.0, learning_rate=0.1),
    "muon": _make_case(1e-9, optimizer=OptimizerName.MUON),
    "experts": _make_case(1e-9, model="nano-moe", dropout=0.2, clip_norm=0.5, optimizer=OptimizerName.MUON),
    "bf16": _make_case(2e-2, dtype="float32", autocast=Autocast.BF16, clip_norm=0.5),
    "fp16": _make_case(2e-2, dtype="float32", autocast=Autocast.FP16, dropout=0.1),
    "sharded, recomputed": _make_case(
        1e-9, L(1, zero=3, recompute=Recompute.FULL), micro_batches=3, clip_norm=0.5, dropout=0.1
    ),
    "sharded, bf16": _make_case(2e-2, L(1, zero=3), dtype="float32", autocast=Autocast.BF16),
    "offloaded, selective": _make_case(1e-9, L(1, zero=1, offload=True, recompute=Recompute.SELECTIVE)),
    "compiled by aot_eager": _make_case(1e-9, compile_backend="aot_eager", dropout=0.1, clip_norm=1.0),
    "compiled by inductor": _make_case(1e-9, compile_backend="inductor", dropout=0.1, clip_norm=1.0),
    "compiled by inductor, float32": _make_case(1e-4, compile_backend="inductor", dtype="float32"),
    "compiled by inductor, bf16": _make_case(
        2e-2, compile_backend="inductor", dtype="float32", autocast=Autocast.BF16, dropout=0.1
    ),
    "compiled by inductor, sharded": _make_case(1e-9, L(1, zero=3), compile_backend="inductor"),
}


def main(folder: Path, rank: int, ranks: int, device: str, case: str) -> None:
    """Train eagerly on a CPU, which is the reference, and with the case's own backend on a GPU."""
    torch.set_num_threads(1)
    chosen = CASES[case]
    settings = chosen.settings if device != "cpu" else replace(chosen.settings, compile_backend="")
    if device == "cpu":
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    else:
        Session(RankEnvironment()).init_process_group()
        assert dist.get_backend() == "nccl"
    losses = train(settings, chosen.plan, device=device)
    (folder / f"found-{rank}.json").write_text(json.dumps(losses))
