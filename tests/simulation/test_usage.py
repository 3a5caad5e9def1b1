"""Usage records of simulations with faults: every GPU-second is recorded once, for the right queue."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest

from scheduler.domain.fleet import PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.fault_injection import SeededFaultInjector
from tests.simulation.test_faults import RATES, world
from tests.usage_check import check_usage

TICKS_BETWEEN = 97


class Meter:
    """Sums the held GPUs of every stored state independently."""

    def __init__(self) -> None:
        self.gpu_s: defaultdict[tuple[str, bool], float] = defaultdict(float)
        self.ticks = 0
        self.simulation: Simulation | None = None
        self._last: Snapshot | None = None
        self._last_s = 0.0

    def on_tick(self, tick: TickRecord) -> None:
        now_s = tick.report.now_s
        for job in self._last.jobs.values() if self._last else ():
            for name, indices in job.allocation.held.items():
                pool = tick.before.pools[tick.before.nodes[name].pool]
                self.gpu_s[job.spec.queue, pool.kind is PoolKind.INFERENCE] += len(indices) * (now_s - self._last_s)
        self._last, self._last_s = tick.after, now_s
        self.ticks += 1
        if self.simulation and self.ticks % TICKS_BETWEEN == 0:
            check_usage(self.simulation.memory_store)

    def on_demand_change(self, change: DemandChange) -> None:
        """Not metered."""


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        ("ebbtide", 21),
        ("srtf", 22),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("ebbtide", 22), ("srtf", 21))),
    ],
)
def test_every_gpu_second_is_recorded_once_despite_faults(policy: str, seed: int) -> None:
    whole = world(seed)
    named = [
        replace(submission, spec=replace(submission.spec, queue=("vision", "text")[at % 2], retries=1000))
        for at, submission in enumerate(whole.submissions)
    ]
    faults, meter = SeededFaultInjector(seed, tuple(node.name for node in whole.nodes), RATES), Meter()
    simulation = Simulation(replace(whole, submissions=tuple(named)), load_policy_set(policy), faults=faults)
    simulation.add_observer(meter)
    meter.simulation = simulation
    last = simulation.run()
    assert not last.jobs
    entries = check_usage(simulation.memory_store)
    sums: defaultdict[tuple[str, bool], float] = defaultdict(float)
    for entry in entries:
        assert 0.0 <= entry.gpu_s <= 3600.0 * sum(node.gpus for node in whole.nodes)
        sums[entry.key.queue, entry.key.is_lent] += entry.gpu_s
    assert dict(sums) == pytest.approx(dict(meter.gpu_s), abs=1e-3)
    assert min(sums.values()) > 1000.0, "both queues must use owned and lent GPUs"
    assert math.fsum(entry.lost_gpu_s for entry in entries) > 0.0, "some work must be lost"
