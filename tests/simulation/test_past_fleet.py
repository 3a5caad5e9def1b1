"""The past as `/v1/history/snapshot` shows it is the state that held then, at any second of days with faults."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import replace
from operator import itemgetter

import pytest

from api.history import load_past_fleet
from scheduler.runtime.fleet_history import FleetHistory
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.past_fleet import PENDING_JOBS_MAX, PastFleet, capture_fleet
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.engine import Simulation, TickRecord
from scheduler.simulator.fault_injection import FaultKind, FaultRates, SeededFaultInjector
from scheduler.simulator.simulate import build_scenario
from scheduler.simulator.throughput_curves import CurveCache
from tests.simulation.synthetic import DAY_S, small_cluster, synthetic_demand, synthetic_jobs

SEEDS = (1, 2)
TIMES = 400
MEAN_GAPS_S = {
    FaultKind.NODE_LOSS: 6_000.0,
    FaultKind.WORKER_CRASH: 3_000.0,
    FaultKind.SLOW_CHECKPOINT: 3_000.0,
    FaultKind.STALE_OBSERVATION: 2_000.0,
    FaultKind.LOST_COMMIT: 1_000.0,
}


class Witness:
    """Observer that keeps the true state of every tick, and writes checkpoints as the leader's thread does."""

    def __init__(self, simulation: Simulation, takeovers: random.Random) -> None:
        self._simulation, self._takeovers = simulation, takeovers
        self._history = self._start()
        self.truth: list[tuple[float, PastFleet]] = []

    def on_tick(self, record: TickRecord) -> None:
        self.truth.append((record.after.now_s, capture_fleet(record.after, 0)))
        if self._takeovers.random() < 0.01:
            self._history = self._start()
        self._history.step()

    def on_demand_change(self, change: DemandChange) -> None:
        """Not checked."""

    def find(self, at_s: float) -> PastFleet:
        return self.truth[bisect_right(self.truth, at_s, key=itemgetter(0)) - 1][1]

    def _start(self) -> FleetHistory:
        simulation = self._simulation
        return FleetHistory(simulation.memory_store, clock=simulation.clock, epoch=lambda: 1, season_s=1000 * DAY_S)


@pytest.fixture
def with_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulations record history, as a service does."""
    monkeypatch.setattr(
        "scheduler.simulator.engine.tick", lambda *args, **options: tick(*args, **{**options, "records_history": True})
    )


def simulate(seed: int, gap_s: float) -> tuple[Simulation, Witness]:
    policies = load_policy_set("ebbtide", PolicySettings())
    jobs = synthetic_jobs(seed, round(1.6 * DAY_S / gap_s), gap_s=gap_s, mean_s=4_000.0)
    demand = synthetic_demand(seed, 2, peak_gpus=30.0)
    scenario = build_scenario(
        jobs, demand, small_cluster(training=3, inference=5), policies, seed=seed, curves=CurveCache()
    )
    submissions = [replace(each, spec=replace(each.spec, retries=1000)) for each in scenario.submissions]
    scenario = replace(scenario, submissions=tuple(submissions))
    nodes = tuple(node.name for node in scenario.nodes)
    faults = SeededFaultInjector(seed, nodes, FaultRates(1.8 * DAY_S, MEAN_GAPS_S))
    simulation = Simulation(scenario, policies, faults=faults)
    witness = Witness(simulation, random.Random(seed))
    simulation.add_observer(witness)
    simulation.run()
    return simulation, witness


def pick_times(witness: Witness, seed: int) -> list[float]:
    """Return random times, and times at and just before ticks, some of them while a node is recalled."""
    chance, last_s = random.Random(f"times/{seed}"), witness.truth[-1][0]
    during_recall = [at_s for at_s, past in witness.truth if any(node.use == "recalled" for node in past.nodes)]
    ticks = [at_s for at_s, _ in chance.choices(witness.truth, k=TIMES // 4)] + chance.choices(during_recall, k=20)
    just_before = (math.nextafter(at_s, -math.inf) for at_s in ticks)
    return [*(chance.uniform(0.0, last_s) for _ in range(TIMES // 2)), *ticks, *just_before]


@pytest.mark.usefixtures("with_history")
@pytest.mark.parametrize("seed", SEEDS)
def test_past_is_exact_at_any_second(seed: int) -> None:
    simulation, witness = simulate(seed, gap_s=700.0)
    uses, waited, compared = set[str](), 0, 0
    for at_s in pick_times(witness, seed):
        past = load_past_fleet(simulation.memory_store, at_s)
        if past is None:
            continue
        truth, compared = witness.find(at_s), compared + 1
        assert past.at_s <= at_s
        assert past.nodes == truth.nodes
        assert past.holding == truth.holding
        assert past.pending_by_queue == truth.pending_by_queue
        assert past.pending == truth.pending[: len(past.pending)]
        assert len(past.pending) == len(truth.pending), "fewer jobs are pending than a checkpoint names"
        uses.update(node.use for node in past.nodes)
        waited = max(waited, sum(jobs for jobs, _ in past.pending_by_queue.values()))
    assert compared > TIMES * 0.95
    assert waited < PENDING_JOBS_MAX
    assert {"training", "inference", "lent", "recalled", "down"} <= uses
