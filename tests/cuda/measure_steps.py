"""Measured step times and memory of GPTs on one GPU, and the speed of its matrix products and attention.

`python -m tests.cuda.measure_steps OUT.csv [SECONDS]` writes one row per measurement, the most valuable first, and
ends after SECONDS (default 140). The model, optimizer and step are those of the reference trainer: AdamW, weights and
residual stream in float32, products and attention in bf16 by autocast. The tokens are random. Steps that run out of
memory have no row, and larger batches of the same model are not tried.

The first columns are those of `measured_training_runs.csv`. `tflops_gpu` and `mfu` of steps count the model's
operations (6 per weight and token, and attention), not those of recomputation. `memory_gib` is what torch reserved.
"""

from __future__ import annotations

import csv
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed import destroy_process_group
from torch.nn import functional
from torch.optim import Optimizer

from ebbtide.environment import RankEnvironment
from ebbtide.session import Session
from ebbtide.status_file import is_out_of_memory
from scheduler.domain.parallel_plan import Recompute
from scheduler.trainer.layout import Layout, build_layout, make_data_parallel_plan
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import Block, GptSize
from scheduler.trainer.model_parts import BuildOptions, ModelPart, build_model_parts
from scheduler.trainer.optimizer import build_optimizers
from scheduler.trainer.pipeline import build_forward_backward

DEFAULT_LIMIT_S = 140.0
WARMUP_STEPS, STEPS = 2, 5
VOCABULARY = 50304
DEVICE = "cuda:0"
PEAK_TFLOPS = 989.4
"""Dense bf16 peak of an H100 SXM, the denominator of `mfu`."""
SHAPES = {"GPT 125M": (12, 768, 12), "GPT 350M": (24, 1024, 16), "GPT 760M": (24, 1536, 16), "GPT 1.3B": (24, 2048, 16)}
"""Layers, hidden size and heads."""
COLUMNS = [
    "source", "hardware", "model", "params_b", "layers", "hidden", "heads", "seq", "vocab", "gpus", "dp", "tp", "pp",
    "vp", "cp", "ep", "zero_fsdp", "micro_batch", "global_batch", "recompute", "precision", "iter_time_s",
    "tflops_gpu", "tokens_s_gpu", "mfu", "memory_gib", "notes",
    "kind", "m", "n", "k", "pass", "reserved_bytes", "allocated_bytes",
]  # fmt: skip
# Tokens x 3 hidden, tokens x 4 hidden and back, and the logits, of the models above and of a 7B model.
GEMMS = [
    (8192, 2304, 768), (8192, 3072, 1024), (8192, 6144, 2048), (8192, 8192, 2048), (8192, 2048, 8192),
    (8192, 50304, 2048), (2048, 6144, 2048), (1024, 3072, 1024), (16384, 12288, 4096), (16384, 16384, 4096),
    (32768, 4096, 4096), (16384, 4096, 16384),
]  # fmt: skip
ATTENTIONS = [
    (8, 12, 1024, 64), (8, 16, 1024, 64), (8, 16, 2048, 64), (8, 16, 2048, 128), (32, 16, 1024, 64),
    (2, 16, 2048, 128), (4, 32, 4096, 128), (1, 32, 8192, 128),
]  # fmt: skip
"""Samples, heads, tokens and head size."""


@dataclass(frozen=True, slots=True)
class StepCase:
    model: str
    sequence: int
    micro_batch: int
    recompute: Recompute


def list_cases() -> Iterator[tuple[str, int, list[StepCase]]]:
    """Yield cases by model and sequence, the most valuable first: rough grids of all models, then what is between."""
    passes = [
        ((2048,), (1, 4, 16), (Recompute.NONE, Recompute.FULL)),
        ((1024,), (2, 8, 32), (Recompute.NONE, Recompute.SELECTIVE)),
        ((2048,), (2, 8, 32), (Recompute.NONE, Recompute.SELECTIVE)),
        ((1024,), (1, 4, 16), (Recompute.NONE, Recompute.FULL)),
        ((2048,), (2, 8, 32), (Recompute.FULL,)),
        ((1024,), (2, 8, 32), (Recompute.FULL,)),
        ((2048, 1024), (1, 4, 16), (Recompute.SELECTIVE,)),
    ]
    for sequences, micro_batches, recomputes in passes:
        for sequence in sequences:
            for model in SHAPES:
                yield (
                    model,
                    sequence,
                    [StepCase(model, sequence, batch, each) for each in recomputes for batch in micro_batches],
                )


class Rows:
    """The file of rows. Each is on disk before the next measurement begins."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="", lineterminator="\n")
        self._writer.writeheader()
        self._deadline_s = time.monotonic() + limit_s
        self._hardware = torch.cuda.get_device_name(0)
        self.count = 0

    @property
    def left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def write(self, **values: Any) -> None:
        fixed = {"source": "tests/cuda/measure_steps.py", "hardware": self._hardware, "gpus": 1}
        rounded = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in values.items()}
        self._writer.writerow({**fixed, "notes": f"torch {torch.__version__}", **rounded})
        self._file.flush()
        self.count += 1


def time_calls(call: Callable[[], object], *, warmup: int, repetitions: int) -> float:
    """Return the median seconds of a call on the GPU."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]  # type: ignore[no-untyped-call]  # torch's
    for _ in range(warmup):
        call()
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    return median(float(start.elapsed_time(end)) for start, end in pairwise(events)) / 1e3


def measure_gemms(rows: Rows) -> None:
    for m, n, k in GEMMS:
        left = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
        right = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
        taken_s = time_calls(lambda x=left, y=right: functional.linear(x, y), warmup=3, repetitions=15)  # type: ignore[misc]  # a lambda of tensors
        tflops = 2 * m * n * k / taken_s / 1e12
        shape = {"m": m, "n": n, "k": k, "precision": "bf16"}
        rows.write(kind="gemm", iter_time_s=taken_s, tflops_gpu=tflops, mfu=100 * tflops / PEAK_TFLOPS, **shape)


def measure_attention(rows: Rows) -> None:
    """Measure causal attention. Its operations are half of those without the mask; backward has 2.5 times as many."""
    for samples, heads, tokens, width in ATTENTIONS:
        parts = [
            torch.randn(samples, heads, tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        forward_flop = 2 * samples * heads * tokens**2 * width
        with torch.no_grad():
            forward_s = time_calls(lambda p=parts: _attend(p), warmup=3, repetitions=15)  # type: ignore[misc]  # as above
        both_s = time_calls(lambda p=parts: _attend_and_back(p), warmup=3, repetitions=15)  # type: ignore[misc]  # as above
        measured = {"forward": (forward_s, forward_flop), "forward and backward": (both_s, 3.5 * forward_flop)}
        for name, (taken_s, flop) in measured.items():
            tflops = flop / taken_s / 1e12
            rows.write(
                **{"kind": "attention", "pass": name, "micro_batch": samples, "heads": heads, "seq": tokens},
                hidden=heads * width,
                precision="bf16",
                iter_time_s=taken_s,
                tflops_gpu=tflops,
                mfu=100 * tflops / PEAK_TFLOPS,
            )


def _attend(parts: list[Tensor]) -> Tensor:
    query, key, value = parts
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attend_and_back(parts: list[Tensor]) -> None:
    for part in parts:
        part.grad = None
    attended = _attend(parts)
    torch.autograd.backward(attended, torch.ones_like(attended))


class StepRunner:
    """A model with its optimizer on the GPU, whose steps are measured at many micro-batch sizes."""

    def __init__(self, model: str, sequence: int) -> None:
        layers, hidden, heads = SHAPES[model]
        self.size = GptSize(layers, hidden, heads, vocabulary=VOCABULARY, sequence=sequence)
        self._options = BuildOptions(self.size, 0, DEVICE, compute_dtype=torch.bfloat16, for_loading=True)
        layout = self._make_layout(1)
        self._meshes = build_meshes(layout, device=DEVICE)
        self._parts: tuple[ModelPart, ...] = build_model_parts(layout, self._meshes, self._options)
        self._model = self._parts[0].model
        for parameter in self._model.parameters():
            # Drawing the trainer's own values takes long.
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
        self._optimizers: tuple[Optimizer, ...] = build_optimizers(
            self._parts[0], layout, learning_rate=1e-5, for_loading=True
        )
        self.parameters = sum(prod(parameter.shape) for parameter in self._model.parameters())

    def _make_layout(self, batch: int) -> Layout:
        plan = make_data_parallel_plan(replicas=1, global_batch=batch)
        return build_layout(plan, world_size=1, block_count=self.size.layers)

    def measure(self, case: StepCase, rows: Rows) -> None:
        """Write the row of a case.

        Raises:
            RuntimeError: it does not fit.
        """
        for block in self._model.blocks.values():
            assert isinstance(block, Block)
            block.recompute = case.recompute
        run = build_forward_backward(self._make_layout(case.micro_batch), self._meshes, self._parts, self._options)
        tokens = torch.randint(VOCABULARY, (case.micro_batch, case.sequence), device=DEVICE)

        def step() -> None:
            run(tokens, tokens)
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()

        for optimizer in self._optimizers:
            optimizer.zero_grad()  # of a step that did not fit
        torch.cuda.reset_peak_memory_stats()
        taken_s = time_calls(step, warmup=WARMUP_STEPS, repetitions=STEPS)
        self._write(case, taken_s, rows)

    def _write(self, case: StepCase, taken_s: float, rows: Rows) -> None:
        size, tokens = self.size, case.micro_batch * case.sequence
        # Attention: forward and backward, causal, so half of 12 x layers x hidden x sequence.
        flop = tokens * (6 * self.parameters + 6 * size.layers * size.hidden * case.sequence)
        tflops, reserved = flop / taken_s / 1e12, torch.cuda.max_memory_reserved()
        rows.write(
            kind="step",
            model=case.model,
            params_b=self.parameters / 1e9,
            layers=size.layers,
            hidden=size.hidden,
            heads=size.heads,
            seq=case.sequence,
            vocab=VOCABULARY,
            **dict.fromkeys(("dp", "tp", "pp", "vp", "cp", "ep"), 1),
            micro_batch=case.micro_batch,
            global_batch=case.micro_batch,
            recompute=str(case.recompute),
            precision="bf16 autocast",
            iter_time_s=taken_s,
            tflops_gpu=tflops,
            tokens_s_gpu=tokens / taken_s,
            mfu=100 * tflops / PEAK_TFLOPS,
            memory_gib=reserved / 2**30,
            reserved_bytes=reserved,
            allocated_bytes=torch.cuda.max_memory_allocated(),
        )


def measure_steps(rows: Rows) -> None:
    """Measure cases until the time is over. The next case is expected to take as long per token as the last one."""
    tight: dict[tuple[str, int, Recompute], int] = {}
    for model, sequence, cases in list_cases():
        if rows.left_s < 5.0:
            return
        runner: StepRunner | None = StepRunner(model, sequence)
        second_per_token = 0.0
        for case in cases:
            key = (case.model, case.sequence, case.recompute)
            expected_s = 1.5 * second_per_token * case.micro_batch * case.sequence
            if case.micro_batch >= tight.get(key, 1 << 30) or rows.left_s < max(3.0, expected_s):
                continue
            started_s = time.monotonic()
            try:
                assert runner is not None
                runner.measure(case, rows)
                second_per_token = (time.monotonic() - started_s) / (case.micro_batch * case.sequence)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                tight[key] = case.micro_batch
            _release_memory()
        runner = None
        _release_memory()


def _release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main(path: Path, limit_s: float = DEFAULT_LIMIT_S) -> None:
    torch.manual_seed(0)
    rows = Rows(path, limit_s)
    Session(RankEnvironment()).init_process_group()
    measure_gemms(rows)
    measure_attention(rows)
    _release_memory()
    measure_steps(rows)
    destroy_process_group()
    print(f"{rows.count} rows in {path}, {rows.left_s:.0f} s left")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:3]))
