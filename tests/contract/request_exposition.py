"""Samples of inference servers over time, in the OpenMetrics form of promtool: counters and histograms of requests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BOUNDS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
"""Bounds of vLLM's histograms for a model of 50,000 tokens."""
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Traffic:
    """Requests that end at one replica: their number until a time, and their lengths, of shape [sample, 2].

    Counters start at zero at `started_s`, after which there are samples at `times_s`.
    """

    times_s: Sequence[float]
    count: Callable[[float], float]
    lengths: NDArray[np.int64]
    started_s: float


class Exposition:
    """Samples by metric. `write` gives them in the order that OpenMetrics requires."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, labels: Labels, samples: Iterable[tuple[float, float]]) -> None:
        """Add samples of a series as pairs of time and value."""
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        self._lines.setdefault(name, []).extend(f"{name}{{{text}}} {value!r} {at_s}" for at_s, value in samples)

    def add_histogram(self, name: str, labels: Labels, traffic: Traffic, tokens: NDArray[np.int64]) -> None:
        """Add the series of a histogram whose observations have the shares of `tokens`."""
        served = [(at_s, traffic.count(at_s) - traffic.count(traffic.started_s)) for at_s in traffic.times_s]
        for bound in (*BOUNDS, float("inf")):
            share, le = float((tokens <= bound).mean()), "+Inf" if bound == float("inf") else f"{bound:.1f}"
            self.add(f"{name}_bucket", {**labels, "le": le}, ((at_s, count * share) for at_s, count in served))
        self.add(f"{name}_sum", labels, ((at_s, count * float(tokens.mean())) for at_s, count in served))

    def add_vllm(self, labels: Labels, traffic: Traffic, waiting: Callable[[float], float] = lambda _: 0.0) -> None:
        """Add what a replica of vLLM exports about its requests."""
        half = [(at_s, (traffic.count(at_s) - traffic.count(traffic.started_s)) / 2) for at_s in traffic.times_s]
        for reason in ("stop", "length"):
            self.add("vllm:request_success_total", {**labels, "finished_reason": reason}, half)
        self.add_histogram("vllm:request_prompt_tokens", labels, traffic, traffic.lengths[:, 0])
        self.add_histogram("vllm:request_generation_tokens", labels, traffic, traffic.lengths[:, 1])
        self.add("vllm:num_requests_running", labels, ((at_s, 8.0) for at_s in traffic.times_s))
        self.add("vllm:num_requests_waiting", labels, ((at_s, waiting(at_s)) for at_s in traffic.times_s))

    def write(self, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for name, lines in self._lines.items():
                file.write(f"# TYPE {name} unknown\n")
                file.writelines(f"{line}\n" for line in lines)
            file.write("# EOF\n")


def build_blocks(promtool: str, exposition: Exposition, folder: Path) -> Path:
    """Write the samples as blocks of Prometheus, and return their folder."""
    samples, data = folder / "samples.txt", folder / "data"
    exposition.write(samples)
    blocks = ["--max-block-duration=744h"]  # the default of two hours gives a month 350 blocks, which take a minute
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", *blocks, str(samples), str(data)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return data
