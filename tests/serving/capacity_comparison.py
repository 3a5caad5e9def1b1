"""GPUs by the capacity model against the smallest pool with which the referee meets the objective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.serving.capacity import LatencyObjective, size_pool
from scheduler.serving.replica_model import BatchLimits, IterationCosts, ReplicaModel
from scheduler.serving.request_mix import RequestMix, build_request_mix
from tests.serving.length_mixes import MIXES, draw_lengths
from tests.serving.serving_simulation import Arrival, ReplicaNumbers, ServingReport, draw_arrivals, simulate

SAMPLE = 20_000
"""Requests whose lengths both sides get."""
MEASURED = (0.35, 0.95)
"""Part of the simulated requests that counts: without the filling and the emptying of the pool."""
PERCENTILE = 0.95


class Setup(NamedTuple):
    """A replica, and bounds in seconds on the 95th percentiles of TTFT and TPOT."""

    numbers: ReplicaNumbers
    ttft_s: float
    tpot_s: float


SETUPS = {
    "h100": Setup(ReplicaNumbers(0.0080, 27e-6, 1.2e-9, 25e-6, 6.0e-8, 2_048, 256, 400_000), 1.0, 0.03),
    "a100": Setup(ReplicaNumbers(0.0120, 80e-6, 2.0e-9, 60e-6, 9.0e-8, 2_048, 256, 380_000), 1.0, 0.05),
    "4090": Setup(ReplicaNumbers(0.0190, 190e-6, 4.0e-9, 180e-6, 1.5e-7, 2_048, 256, 32_000), 2.0, 0.06),
}
"""An 8B model in 16 bits: about what the published runs and datasheets give for one GPU of each kind. The last one has
little memory for its cache, so that admission and preemption decide."""


class Cell(NamedTuple):
    """One cell of the grid: names of a setup and a mix, requests per second, SCV of arrivals."""

    setup: str
    mix: str
    rate_per_s: float
    scv: float


class Comparison(NamedTuple):
    """Replicas by the model and by the referee, and the report of the referee at the model's pool."""

    cell: Cell
    model: int
    referee: int
    report: ServingReport

    @property
    def error(self) -> float:
        return self.model / self.referee - 1

    @property
    def is_within(self) -> bool:
        """Whether the model is within 10% of the referee."""
        return abs(self.error) <= 0.1 + 1e-9

    @property
    def is_within_one(self) -> bool:
        """Whether the model is within 10% of the referee, or one replica from it."""
        return self.is_within or abs(self.model - self.referee) == 1


RATES: Mapping[str, tuple[float, ...]] = {
    "h100": (1, 7, 30, 120, 500),
    "a100": (1, 7, 30, 120),
    "4090": (0.5, 3, 12, 50),
}
GRID = tuple(
    Cell(setup, mix, rate, scv) for setup, rates in RATES.items() for mix in MIXES for rate in rates for scv in (1, 4)
)


def compare_cells(cells: Iterable[Cell], seed: int) -> Iterator[Comparison]:
    for number, cell in enumerate(cells):
        yield compare_cell(cell, seed + number)


def compare_cell(cell: Cell, seed: int) -> Comparison:
    """Size the pool of a cell by the model, and find the smallest pool that meets the objective by simulation."""
    sized = size_pool(*build_sizing(cell, seed)).replicas
    found, reports = _search_referee(cell, _draw_lengths(cell, seed), sized, seed)
    return Comparison(cell, sized, found, reports[sized])


def find_referee(setup: str, rate_per_s: float, lengths: NDArray[np.int64], *, start: int) -> int:
    """Return the smallest pool that meets the objective for requests of these lengths, searched from `start` on."""
    return _search_referee(Cell(setup, "", rate_per_s, 1), lengths, start, 7)[0]


def _search_referee(
    cell: Cell, lengths: NDArray[np.int64], start: int, seed: int
) -> tuple[int, dict[int, ServingReport]]:
    """Return the smallest pool that meets the objective by simulation, and the reports of all that were tried."""
    setup = SETUPS[cell.setup]
    arrivals = _draw_pool_arrivals(cell, lengths, setup, seed)
    reports: dict[int, ServingReport] = {}

    def meets(replicas: int) -> bool:
        reports[replicas] = simulate(setup.numbers, replicas, arrivals, measured=MEASURED)
        return reports[replicas].meets(setup.ttft_s, setup.tpot_s, PERCENTILE)

    found = start
    if meets(start):
        while found > 1 and meets(found - 1):
            found -= 1
    else:
        while not meets(found):
            found += 1
    return found, reports


def build_sizing(cell: Cell, seed: int) -> tuple[RequestMix, ReplicaModel, LatencyObjective]:
    """Return the arguments of `size_pool` for a cell."""
    setup = SETUPS[cell.setup]
    mix = build_request_mix(cell.rate_per_s, _draw_lengths(cell, seed).tolist(), arrival_scv=cell.scv)
    replica = ReplicaModel(IterationCosts(*setup.numbers[:5]), BatchLimits(*setup.numbers[5:8]), 1)
    return mix, replica, LatencyObjective(setup.ttft_s, setup.tpot_s, PERCENTILE)


def _draw_lengths(cell: Cell, seed: int) -> NDArray[np.int64]:
    longest = SETUPS[cell.setup].numbers.kv_tokens // 3
    return np.minimum(draw_lengths(np.random.default_rng(seed), MIXES[cell.mix], SAMPLE), longest)


def _draw_pool_arrivals(cell: Cell, lengths: NDArray[np.int64], setup: Setup, seed: int) -> list[Arrival]:
    """Return arrivals over at least twelve times the residence of a request, at exactly the rate of the cell.

    Lengths are those of the sample in random order, so that chance does not change the load.
    """
    residence_s = float(lengths[:, 1].mean()) * setup.tpot_s
    requests = round(max(min(max(cell.rate_per_s * 2_000, 8_000), SAMPLE), 12 * residence_s * cell.rate_per_s))
    generator = np.random.default_rng([seed, 1])
    rows = np.concatenate([generator.permutation(lengths) for _ in range(-(-requests // SAMPLE))])[:requests]
    drawn = list(draw_arrivals(generator, cell.rate_per_s, rows, scv=cell.scv))
    stretch = requests / cell.rate_per_s / drawn[-1].at_s
    return [arrival._replace(at_s=arrival.at_s * stretch) for arrival in drawn]
