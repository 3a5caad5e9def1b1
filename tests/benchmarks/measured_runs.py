"""Published training runs as MeasuredRun: readers of the files in tests/data/measured (see README.md there for
sources).

Values that a file lacks come from the public code of its authors, once for all rows:

* SC21: heads, micro-batches and interleaving of NVIDIA/Megatron-LM, examples/sc21.
* vTrain: the vocabulary is the default of its configuration, 50,257 columns, unpadded: unsplit heads are slower than a
  padded vocabulary explains, and heads split in two are not. Its simulator assumes recompute throughout. On one node
  that would mean 200 TFLOP/s at a width of 2,048, where SC21 reports 137 at 2,304 with recompute and large batches. So
  recompute is assumed only for runs on several nodes, which do not fit without it.
* torchtitan: PyTorch's attention of December 2024, which is FlashAttention-2, on H100 with 96 GB and 500 W.
* llm-foundry: FSDP in nodes of 8 with the Triton attention kernel of 2023 and a fused loss (its `train` scripts). No
  column of `ebbtide fit` expresses activations on the host, so rows with them are refused.
* Rubick: the digits of a plan are pipeline, tensor and data degree, with one micro-batch.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.calibration.measured_runs import MeasuredRun, build_even_plan, parse_measured_runs
from scheduler.solver.profiles.architecture import Architecture, Family
from scheduler.solver.profiles.catalog import load_gpu
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import Attachment, LayerProfile, ModelProfile
from scheduler.solver.profiles.training_software import AttentionKernel, TrainingSoftware
from scheduler.solver.profiles.transformer import build_transformer_profile

FOLDER = Path(__file__).parent.parent / "data" / "measured"
GIB = 2**30
A100, A100_40G, H100, A800 = "a100-80g", "a100-40g", "h100-80g", "a800-80g"
GPUS_PER_NODE = 8
H100_96G = replace(
    load_gpu(H100),
    memory_bytes=96_000_000_000,
    efficiency=0.65,
    attention_efficiency=0.158,
    memory_bandwidth_bytes_per_s=1.39e12,
)
"""The GPU of torchtitan's runs: HBM2e (6 stacks of 400 GB/s, of which the share of h100-80g is reached) and 500 W.

Efficiencies are those of h100-80g times (500 W / 700 W) ** 0.4. The exponent was chosen with these runs in sight.
"""
MEGATRON: dict[str, Any] = {"biases": True, "dropout": True, "tied_embedding": True, "stored_scores": True}
LLAMA_3_8B: dict[str, Any] = {"kv_heads": 8, "ffn": 14_336, "gated_mlp": True}
_SC21 = {  # model: heads, micro-batch of a replica, chunks a device
    "GPT 1.7B": (24, 16, 1),
    "GPT 3.6B": (32, 16, 1),
    "GPT 7.5B": (32, 16, 1),
    "GPT 18B": (48, 8, 1),
    "GPT 39B": (64, 4, 1),
    "GPT 76B": (80, 2, 3),
    "GPT 145B": (96, 2, 2),
    "GPT 310B": (128, 1, 2),
    "GPT 530B": (128, 1, 3),
    "GPT 1000B": (160, 1, 1),
}
_RECOMPUTE = {"full": Recompute.FULL, "none": Recompute.NONE}
_VTRAIN_VOCABULARY = 50_257


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _whole(row: Mapping[str, str], column: str, default: int = 1) -> int:
    return int(float(row[column])) if row[column] else default


def published(source: str) -> list[tuple[str, MeasuredRun]]:
    """Return runs of measured_training_runs.csv by name. `source` is "SC21", "2205.05198" or "torchtitan".

    Runs that report only memory have an infinite iteration time.
    """
    rows = _rows("measured_training_runs.csv")
    if source == "torchtitan":
        wanted = [row for row in rows if "H100" in row["hardware"] and row["precision"] == "bf16"]
    else:
        wanted = [row for row in rows if source in row["source"]]
    return [(f"{row['model']} {row['recompute']} {row['gpus']}", _published(row, source)) for row in wanted]


def _published(row: dict[str, str], source: str) -> MeasuredRun:
    titan = source == "torchtitan"
    layers, hidden, tokens, vocabulary = (_whole(row, column) for column in ("layers", "hidden", "seq", "vocab"))
    batch, dp, tp, pp = (_whole(row, column) for column in ("global_batch", "dp", "tp", "pp"))
    heads, samples, chunks = _whole(row, "heads"), _whole(row, "micro_batch"), _whole(row, "vp")
    time_s = float(row["iter_time_s"] or "inf")
    if source == "SC21":
        heads, samples, chunks = _SC21[row["model"]]
        flops = 96 * batch * tokens * layers * hidden**2 * (1 + tokens / 6 / hidden + vocabulary / 16 / layers / hidden)
        time_s = flops / (float(row["tflops_gpu"]) * 1e12 * float(row["gpus"]))
    if titan:
        time_s = samples * tokens / float(row["tokens_s_gpu"])
    sizes: dict[str, Any] = LLAMA_3_8B if titan else {"ffn": 4 * hidden, "positions": tokens, **MEGATRON}
    model = build_transformer_profile(
        row["model"],
        Architecture(Family.DECODER, layers, hidden, heads, sequence_length=tokens, vocabulary=vocabulary, **sizes),
    )
    strategy = LayerStrategy(
        layers=1,
        tp=tp,
        dp=dp,
        sequence_sharding="SP" in row["recompute"],
        recompute=Recompute.FULL if source == "SC21" else _RECOMPUTE.get(row["recompute"], Recompute.SELECTIVE),
        zero=3 if titan else 0,
        shard_group=dp if titan else 1,
    )
    gpu = H100 if titan else A100
    if titan:
        model = replace(model, software=TrainingSoftware(attention=AttentionKernel.FLASH_2))
    return MeasuredRun(
        model,
        GpuShape.packed(gpu, tp * dp * pp, GPUS_PER_NODE),
        build_even_plan(
            strategy,
            layers=layers,
            gpu=gpu,
            pipeline=pp,
            interleave=chunks,
            micro_batches=batch // dp // samples,
            samples_per_replica=samples,
        ),
        time_s,
        round(float(row["memory_gib"] or 0) * GIB),
    )


def vtrain(which: str) -> list[MeasuredRun]:
    """Return the vTrain runs on one node ("single") or several ("multi"), all on A100."""
    return [_vtrain(row, which) for row in _rows(f"vtrain_{which}_node_a100.csv")]


def _vtrain(row: dict[str, str], which: str) -> MeasuredRun:
    layers, hidden, tokens = (int(row[column]) for column in ("layers", "hidden size", "sequence length"))
    tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
    samples = int(row["micro batch"])
    architecture = Architecture(
        Family.DECODER,
        layers,
        hidden,
        int(row["attention heads"]),
        ffn=4 * hidden,
        sequence_length=tokens,
        positions=tokens,
        vocabulary=_VTRAIN_VOCABULARY,
        **MEGATRON,
    )
    strategy = LayerStrategy(1, tp=tp, dp=dp, recompute=Recompute.FULL if which == "multi" else Recompute.NONE)
    plan = build_even_plan(
        strategy,
        layers=layers,
        gpu=A100,
        pipeline=pp,
        interleave=1,
        micro_batches=int(row["global batch"]) // dp // samples,
        samples_per_replica=samples,
    )
    shape = GpuShape.packed(A100, tp * dp * pp, GPUS_PER_NODE)
    return MeasuredRun(
        build_transformer_profile("vTrain", architecture), shape, plan, float(row["iteration time (ms)"]) / 1e3
    )


@dataclass(frozen=True, slots=True)
class FoundryRuns:
    """The runs of llm-foundry on one GPU model, with their rows, and the rows that cannot be expressed."""

    runs: tuple[MeasuredRun, ...]
    rows: tuple[Mapping[str, str], ...]
    refused: tuple[Mapping[str, str], ...]


_FOUNDRY_ZERO = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
_FOUNDRY_RECOMPUTE = {"True": "full", "False": "none"}
_FOUNDRY_COLUMNS = ("layers", "hidden", "heads", "gpus", "micro_batch", "global_batch")


def llm_foundry(gpu: str) -> FoundryRuns:
    """Return the runs of llm_foundry_runs.csv on `gpu`, read through the columns of `ebbtide fit`."""
    rows = [row for row in _rows("llm_foundry_runs.csv") if row["gpu"] == gpu]
    refused = [row for row in rows if row["activation_cpu_offload"] == "True"]
    kept = [row for row in rows if row not in refused]
    cells = [_to_fit_columns(row) for row in kept]
    text = "\n".join([",".join(cells[0]), *(",".join(each.values()) for each in cells)])
    return FoundryRuns(parse_measured_runs(text, load_gpu(gpu)), tuple(kept), tuple(refused))


def _to_fit_columns(row: Mapping[str, str]) -> dict[str, str]:
    tokens = int(row["global_batch"]) * int(row["seq"])
    return {
        **{column: row[column] for column in _FOUNDRY_COLUMNS},
        "family": "decoder",
        "sequence_length": row["seq"],
        "vocabulary": row["vocab"],
        "tied_embedding": "true",
        "attention": "flash-1",
        "loss": "fused",
        "data": row["gpus"],
        "zero": str(_FOUNDRY_ZERO[row["sharding"]]),
        "recompute": _FOUNDRY_RECOMPUTE[row["activation_checkpointing"]],
        "iteration_time_s": str(tokens / float(row["tokens_per_s"])),
    }


_DENSE: dict[str, Any] = {"biases": True, "dropout": True, "stored_scores": True}
_LLAMA: dict[str, Any] = {"vocabulary": 32_000, "sequence_length": 2_048, "gated_mlp": True, "stored_scores": True}
RUBICK: dict[str, tuple[int, Architecture]] = {  # model: global batch, architecture
    "gpt2": (16, Architecture(Family.DECODER, 48, 1_600, 25, 6_400, 1_024, vocabulary=50_257, **_DENSE)),
    "bert": (32, Architecture(Family.ENCODER, 24, 1_024, 16, 4_096, 512, vocabulary=30_522, **_DENSE)),
    "t5": (
        16,
        Architecture(
            Family.ENCODER_DECODER,
            24,
            1_024,
            16,
            9_216,  # That of T5-Large is 4,096; this gives the 1.24e9 parameters that Rubick counts.
            512,
            decoder_layers=24,
            target_length=512,
            vocabulary=32_128,
            dropout=True,
            stored_scores=True,
        ),
    ),
    "vit": (
        64,
        Architecture(
            Family.VISION, 12, 768, 12, 3_072, 197, classes=1_000, image_size=224, patch_size=16, channels=3, **_DENSE
        ),
    ),
    "roberta": (64, Architecture(Family.ENCODER, 24, 1_024, 16, 4_096, 512, vocabulary=50_265, **_DENSE)),
    "llama7": (8, Architecture(Family.DECODER, 32, 4_096, 32, 11_008, **_LLAMA)),
    "llama7b_bsz16": (16, Architecture(Family.DECODER, 32, 4_096, 32, 11_008, **_LLAMA)),
    "llama30": (4, Architecture(Family.DECODER, 60, 6_656, 52, 17_920, **_LLAMA)),
}
_ROBERTA_SAMPLES_MAX = 32
"""Runs on one GPU without recompute take as long as half of the batch would; the file does not explain why."""


def rubick_hardware() -> HardwareProfile:
    """Return the start profile of the fits to Rubick's runs: an A800 with eager PyTorch, whose DDP overlaps half of its
    reduction.

    The rates are rounded from fits to whole models of the same file, so they are not independent of it.
    """
    return replace(
        load_gpu(A800),
        efficiency=0.3,
        memory_bandwidth_bytes_per_s=8e11,
        launch_s=3e-4,
        intra_bandwidth_bytes_per_s=6e10,
        inter_bandwidth_bytes_per_s=1e10,
        gradient_overlap=0.5,
    )


RUBICK_CONSTANTS = (
    "efficiency",
    "memory_bandwidth_bytes_per_s",
    "launch_s",
    "intra_bandwidth_bytes_per_s",
    "inter_bandwidth_bytes_per_s",
    "iteration_overhead_s",
    "gradient_overlap",
    "host_bandwidth_bytes_per_s",
    "host_optimizer_s_per_parameter",
)


def rubick(model: str) -> list[tuple[str, MeasuredRun]]:
    """Return the runs of one model with the kind of their plan. A placement has one digit per node.

    Skips runs that failed and runs that do not use all of their GPUs.
    """
    batch, architecture = RUBICK[model]
    profile, found = build_transformer_profile(model, architecture), []
    for row in _rows("rubick_a800_placements.csv"):
        gpus = [int(digit) for digit in row["placement"]]
        sliced = row["exec_plan"].isdigit()
        pp, tp, dp = map(int, row["exec_plan"]) if sliced else (1, 1, sum(gpus))
        if row["model"] != model or float(row["iter_time"]) <= 0 or pp * tp * dp != sum(gpus):
            continue
        samples = batch / dp
        if model == "roberta" and not sliced and "gc" not in row["exec_plan"]:
            samples = min(samples, _ROBERTA_SAMPLES_MAX)
        micro_batches = round(samples) if sliced and model == "llama7b_bsz16" else 1
        zero = 2 if "zero" in row["exec_plan"] and dp > 1 else 0
        strategy = LayerStrategy(
            layers=1,
            tp=tp,
            dp=dp,
            zero=zero,
            shard_group=dp if zero else 1,
            offload="offload" in row["exec_plan"],
            recompute=Recompute.FULL if "gc" in row["exec_plan"] else Recompute.NONE,
        )
        plan = build_even_plan(
            strategy,
            layers=profile.layer_count,
            gpu=A800,
            pipeline=pp,
            interleave=1,
            micro_batches=micro_batches,
            samples_per_replica=1,
        )
        shape = GpuShape.from_node_counts([(A800, count) for count in gpus])
        run = MeasuredRun(_scale_profile(profile, samples / micro_batches), shape, plan, float(row["iter_time"]))
        found.append(("3d" if sliced else row["exec_plan"], run))
    return found


def _scale_profile(profile: ModelProfile, samples: float) -> ModelProfile:
    """Return `profile` with `samples` samples as one, because a batch need not be divisible by the replicas."""
    return replace(
        profile,
        layers=tuple(_times(run, samples, _PER_SAMPLE) for run in profile.layers),
        embedding=_times(profile.embedding, samples, _PER_SAMPLE_ATTACHED),
        head=_times(profile.head, samples, _PER_SAMPLE_ATTACHED),
    )


def _times(part: Any, samples: float, names: tuple[str, ...]) -> Any:
    scaled = {name: getattr(part, name) * samples for name in names}
    return replace(
        part, **{name: round(value) if name.endswith("bytes_per_sample") else value for name, value in scaled.items()}
    )


_PER_SAMPLE = tuple(
    name for name in LayerProfile.__dataclass_fields__ if name.endswith(("flops_per_sample", "bytes_per_sample"))
)
_PER_SAMPLE_ATTACHED = tuple(
    name for name in Attachment.__dataclass_fields__ if name.endswith(("flops_per_sample", "bytes_per_sample"))
)
