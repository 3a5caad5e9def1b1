"""Plans in the words of each framework, written out. EBBTIDE_GOLDEN=write rewrites the files; read the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.plan_export.frameworks import FRAMEWORKS
from tests.builders_plan_export import build_plan

FOLDER = Path(__file__).parent / "plans"

ONE_GPU = build_plan(4)
REPLICAS = build_plan(4, strategy=LayerStrategy(1, dp=8))
ZERO_3 = build_plan(4, strategy=LayerStrategy(1, dp=8, zero=3, shard_group=8, recompute=Recompute.FULL))
ZERO_3_STREAMED = build_plan(
    4, strategy=LayerStrategy(1, dp=4, zero=3, shard_group=4, offload=True, offload_parameters=True)
)
ZERO_2_OFFLOAD = build_plan(4, strategy=LayerStrategy(1, dp=4, zero=2, shard_group=4, offload=True))
HYBRID = build_plan(4, strategy=LayerStrategy(1, tp=2, dp=8, zero=3, shard_group=4))
TENSOR = build_plan(4, strategy=LayerStrategy(1, tp=4, dp=2, zero=2, shard_group=2))
RING = build_plan(4, strategy=LayerStrategy(1, tp=2, dp=2, ring=2, zero=3, shard_group=4))
ULYSSES = build_plan(4, strategy=LayerStrategy(1, dp=2, ulysses=4, zero=1, shard_group=8))
UNEVEN = build_plan(5, 7, 7, 5, strategy=LayerStrategy(1, tp=2, sequence_sharding=True, dp=2, zero=1, shard_group=2))
EVEN = build_plan(6, 6, strategy=LayerStrategy(1, tp=2, sequence_sharding=True, dp=2, zero=3, shard_group=2))
INTERLEAVED = build_plan(
    *(2,) * 4, interleave=2, strategy=LayerStrategy(1, tp=2, sequence_sharding=True, recompute=Recompute.SELECTIVE)
)
USP = build_plan(4, strategy=LayerStrategy(1, tp=2, sequence_sharding=True, ulysses=2, ring=4, zero=1, shard_group=8))
EXPERTS = build_plan(4, 4, strategy=LayerStrategy(1, dp=8, ep=4, zero=3, shard_group=8))
BY_LAYER = build_plan(
    *(3, 4),
    strategy=LayerStrategy(1, dp=4, zero=2, shard_group=4),
    others=(
        LayerStrategy(1, tp=2, sequence_sharding=True, dp=2, zero=3, shard_group=2),
        LayerStrategy(1, dp=2, ulysses=2, zero=3, shard_group=4, recompute=Recompute.FULL),
    ),
)

PLANS: dict[str, dict[str, ParallelPlan]] = {
    "megatron-lm": {"uneven": UNEVEN, "interleaved": INTERLEAVED, "ulysses and ring": USP, "one gpu": ONE_GPU},
    "deepspeed": {
        "zero 3": ZERO_3,
        "zero 3 streamed": ZERO_3_STREAMED,
        "zero 2 with offload": ZERO_2_OFFLOAD,
        "tensor": TENSOR,
        "ulysses": ULYSSES,
    },
    "torchtitan": {"even": EVEN, "interleaved": INTERLEAVED, "hybrid": HYBRID, "ring": RING, "experts": EXPERTS},
    "accelerate": {"replicas": REPLICAS, "zero 3": ZERO_3, "hybrid": HYBRID, "ring": RING, "one gpu": ONE_GPU},
    "galvatron": {"by layer": BY_LAYER},
    "colossalai": {"uneven": UNEVEN, "ulysses": ULYSSES, "one gpu": ONE_GPU},
    "llama-factory": {"zero 3": ZERO_3, "zero 2 with offload": ZERO_2_OFFLOAD},
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_plans_in_the_words_of_a_framework(name: str) -> None:
    text = "\n".join(_format(name, title, plan) for title, plan in PLANS[name].items())
    path = FOLDER / f"{name}.txt"
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def _format(name: str, title: str, plan: ParallelPlan) -> str:
    exported = FRAMEWORKS[name].export(plan)
    lines = [f"# {title}: {plan.summarize()} on {plan.world_size} GPUs"]
    if exported.args:
        lines.append(" ".join(exported.args))
    if exported.file is not None:
        lines += [f"## {exported.file.name}", exported.file.text.rstrip()]
    return "\n".join(lines) + "\n"
