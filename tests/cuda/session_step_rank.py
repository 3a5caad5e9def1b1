"""A rank whose steps take about 20 ms on the GPU, alone and with `ebbtide.elastic`.

`python -m tests.cuda.session_step_rank synchronisation|overhead` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

import ebbtide

STEP_MS = 20.0
WIDTH = 4096
BLOCK_STEPS, BLOCKS = 60, 4
UNSYNCHRONISED_STEPS = 150


class Step:
    """A step of a training: products that take about `STEP_MS`, backward and an optimizer step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(64, 64, device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._inputs = torch.randn(64, 64, device="cuda")
        self._matrix = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / WIDTH**0.5
        self._products = 1
        product_ms = min(self._measure_ms(products=20) for _ in range(5)) / 20
        self._products = max(1, round(STEP_MS / product_ms))

    def __call__(self) -> Tensor:
        self._multiply(self._products)
        loss: Tensor = self.model(self._inputs).square().mean()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._matrix, self._matrix)

    def _measure_ms(self, *, products: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start.record()
        self._multiply(products)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def check_synchronisation() -> dict[str, Any]:
    """Make each synchronisation inside the session's calls an error, and return the status at the end."""
    step = Step()
    with ebbtide.elastic(step.model, step.optimizer) as run:
        for number in run.steps(UNSYNCHRONISED_STEPS):
            loss = step()
            if number % 10 == 0:
                torch.cuda.synchronize()  # the host must not run ahead of the GPU by all steps
            torch.cuda.set_sync_debug_mode("error")
            run.report(loss=loss)
            run.session.poll_notice()
            run.session.heartbeat()
        torch.cuda.set_sync_debug_mode("default")
        status = run.session.status
    return {"step": status.step, "loss": status.loss, "peak_bytes": status.peak_bytes}


def measure_overhead() -> dict[str, Any]:
    """Return the times of steps in ms, from the start of each on the GPU to the start of the next.

    Each step reads its loss, so the host never runs ahead and the session's time adds to the step. Blocks with and
    without the session take turns, so that a change of the clock rate concerns both.
    """
    step = Step()
    times_ms: dict[str, list[float]] = {"alone": [], "session": []}
    with ebbtide.elastic(step.model, step.optimizer) as run:
        steps = run.steps(BLOCKS * BLOCK_STEPS + 1)
        next(steps)
        for _ in range(BLOCKS):
            times_ms["alone"] += _time_steps(lambda: step().item())
            times_ms["session"] += _time_steps(lambda: _run_with_session(step, run, steps))
    found = {name: {"median_ms": median(each), "mean_ms": mean(each)} for name, each in times_ms.items()}
    alone, together = found["alone"]["median_ms"], found["session"]["median_ms"]
    return {**found, "overhead": together / alone - 1.0, "steps": len(times_ms["session"])}


def _run_with_session(step: Step, run: Any, steps: Iterator[int]) -> None:
    loss = step()
    loss.item()
    run.report(loss=loss)
    next(steps)


def _time_steps(run_step: Callable[[], object]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(BLOCK_STEPS + 1)]  # type: ignore[no-untyped-call]  # torch's
    for event in events[:-1]:
        event.record()
        run_step()
    events[-1].record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


if __name__ == "__main__":
    found = {"synchronisation": check_synchronisation, "overhead": measure_overhead}[sys.argv[1]]()
    print(json.dumps(found))
