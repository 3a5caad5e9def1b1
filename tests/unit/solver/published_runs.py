"""Published training runs as plans, against which the cost model is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName, Stage
from scheduler.solver.evaluate import Evaluation, evaluate
from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.catalog import load_gpu
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.transformer import build_transformer_profile
from scheduler.solver.request import SolveRequest

_MODELS = {  # layers, hidden, heads
    "1.7B": (24, 2304, 24),
    "3.6B": (30, 3072, 32),
    "7.5B": (36, 4096, 32),
    "18B": (40, 6144, 48),
    "22B": (48, 6144, 64),
    "39B": (48, 8192, 64),
    "76B": (60, 10240, 80),
    "145B": (80, 12288, 96),
    "175B": (96, 12288, 96),
    "310B": (96, 16384, 128),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}

_SC21 = [  # model, (tp, pp, dp), interleave, micro-batch, global batch, TFLOP/s
    ("1.7B", (1, 1, 32), 1, 16, 512, 137),
    ("3.6B", (2, 1, 32), 1, 16, 512, 138),
    ("7.5B", (4, 1, 32), 1, 16, 512, 142),
    ("18B", (8, 1, 32), 1, 8, 1024, 135),
    ("39B", (8, 2, 32), 1, 4, 1536, 138),
    ("76B", (8, 4, 32), 3, 2, 1792, 140),
    ("145B", (8, 8, 24), 2, 2, 2304, 148),
    ("310B", (8, 16, 15), 2, 1, 2160, 155),
    ("530B", (8, 35, 9), 3, 1, 2520, 163),
    ("1T", (8, 64, 6), 1, 1, 3072, 163),
]

_KORTHIKANTI = [  # model, pp, interleave, micro-batch, global batch, s full, s selective, GiB none, GiB selective
    ("22B", 1, 1, 4, 4, 1.42, 1.10, 104.81, 55.13),
    ("175B", 8, 3, 1, 64, 18.13, 13.75, 112.41, 57.91),
    ("530B", 35, 3, 1, 280, 49.05, 37.83, 145.66, 54.72),
    ("1T", 64, 1, 1, 512, 94.42, 71.49, 164.21, 59.52),
]

_TORCHTITAN = [(8, 5762, 82.4), (8, 6667, 77.0), (128, 5605, 67.0), (128, 6514, 62.0)]  # GPUs, tokens/s, GiB


@dataclass(frozen=True)
class Run:
    """One row of a publication; 0 if it gives no figure."""

    name: str
    request: SolveRequest
    plan: ParallelPlan
    time_s: float = 0.0
    memory_gib: float = 0.0

    def judged(self, hardware: HardwareProfile | None = None) -> Evaluation:
        return evaluate(self.plan, replace(self.request, hardware=(hardware,)) if hardware else self.request)


def load_megatron_runs() -> list[Run]:
    """Return the A100 rows."""
    runs = []
    for model, degrees, chunks, micro, batch, tflops in _SC21:
        layers, hidden, _ = _MODELS[model]
        tp, pp, dp = degrees
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        run = _megatron(model, LayerStrategy(1, tp=tp, dp=dp, recompute=Recompute.FULL), (pp, chunks, micro, batch))
        runs.append(replace(run, name=f"SC21 {model}", time_s=flops / (tflops * 1e12 * tp * pp * dp)))
    full = LayerStrategy(1, tp=8, recompute=Recompute.FULL)
    selective = LayerStrategy(1, tp=8, sequence_sharding=True, recompute=Recompute.SELECTIVE)
    for model, pp, chunks, micro, batch, full_s, selective_s, none_gib, selective_gib in _KORTHIKANTI:
        pipeline = pp, chunks, micro, batch
        runs.append(replace(_megatron(model, full, pipeline), name=f"{model} full", time_s=full_s))
        both = replace(_megatron(model, selective, pipeline), name=f"{model} selective")
        runs.append(replace(both, time_s=selective_s, memory_gib=selective_gib))
        none = _megatron(model, LayerStrategy(1, tp=8), pipeline)
        runs.append(replace(none, name=f"{model} none", memory_gib=none_gib))
    return runs


def load_torchtitan_runs() -> list[Run]:
    """Return the H100 rows: Llama-3.1-8B, FSDP, selective recompute of every second product."""
    llama = Architecture(
        family=Family.DECODER, layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256,
        sequence_length=8192, gated_mlp=True,
    )  # fmt: skip
    runs = []
    for gpus, tokens_per_s, memory_gib in _TORCHTITAN:
        strategy = LayerStrategy(1, dp=gpus, zero=3, shard_group=gpus, recompute=Recompute.SELECTIVE)
        run = _run(llama, "h100-80g", strategy, (1, 1, 2, 2 * gpus))
        runs.append(replace(run, name=f"torchtitan {gpus} GPUs", time_s=2 * 8192 / tokens_per_s, memory_gib=memory_gib))
    return runs


def _megatron(model: str, strategy: LayerStrategy, pipeline: tuple[int, int, int, int]) -> Run:
    layers, hidden, heads = _MODELS[model]
    gpt = Architecture(
        family=Family.DECODER, layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocabulary=51200,
        sequence_length=2048, positions=2048, biases=True, dropout=True, tied_embedding=True, stored_scores=True,
    )  # fmt: skip
    return _run(gpt, "a100-80g", strategy, pipeline)


def _run(model: Architecture, gpu: str, strategy: LayerStrategy, pipeline: tuple[int, int, int, int]) -> Run:
    """`pipeline` is (devices, interleave, samples of a micro-batch and replica, global batch)."""
    devices, chunks, micro, batch = pipeline
    stages, length = devices * chunks, model.layers // (devices * chunks)
    plan = ParallelPlan(
        schedule=Schedule(ScheduleName.INTERLEAVED, chunks) if chunks > 1 else Schedule(),
        micro_batches=batch // (strategy.dp * micro),
        micro_batch_size=micro * strategy.dp,
        iteration_time_s=0.0,
        samples_per_s=0.0,
        peak_bytes_per_gpu=0,
        stages=tuple(
            Stage(i * length, (i + 1) * length - 1, gpu, strategy.gpus, (replace(strategy, layers=length),))
            for i in range(stages)
        ),
    )
    shape = GpuShape.packed(gpu, strategy.gpus * devices, 8)
    return Run("", SolveRequest(build_transformer_profile("published", model), (load_gpu(gpu),), shape, batch), plan)
