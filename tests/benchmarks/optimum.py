"""Distance of reclaiming and of the knapsack from the optimum, and their time at scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from math import inf
from random import Random
from statistics import mean, median
from time import process_time

import numpy as np

from baselines.milp.formulation import MilpModel
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.knapsack import Item, solve_knapsack
from scheduler.scheduling.policies.recall_cost import RecallCost
from scheduler.scheduling.policies.recall_search import find_cheapest_nodes
from scheduler.scheduling.policies.recall_selection import RecallNeed, build_recall_cost, least_preemption_cost
from tests.builders import a_fleet, a_loan, a_snapshot
from tests.properties.test_knapsack_exact import alike, any_order, best_s, curve, falling, nodes
from tests.properties.test_recall_optimum import NOW_S, SETTINGS, a_job_on, a_lent_fleet, build_cost_function, is_usable

Row = tuple[str, str, str]
MILP_LIMIT_S = 60.0


def rows() -> Iterator[Row]:
    """Return (name, target, measured)."""
    yield (
        "knapsack, 1,000 random instances, to exact dynamic programming",
        "equal",
        _ratios(list(_knapsack_ratios(200))),
    )
    for groups, items, budget, bar in ((60, 8, 300, "1 ms"), (2_000, 16, 2_000, "50 ms")):
        yield (
            f"knapsack, {groups:,} groups x {items} items, {budget:,} GPUs",
            bar,
            _knapsack_time(groups, items, budget),
        )
    ratios = [ratio for crowded in (True, False) for ratio in _recall_ratios(500, crowded)]
    yield "reclaiming, 1,000 random fleets of up to 12 lent nodes, to all choices", "5%", _ratios(ratios)
    yield "reclaiming, 10 of 60 lent nodes, 20 fleets, to HiGHS", "", _ratios(list(_milp_ratios(20, 60, 10)))
    yield "reclaiming, 30 of 200 lent nodes, 6 fleets, to HiGHS", "", _ratios(list(_milp_ratios(6, 200, 30)))
    yield "reclaiming, 100 of 1,000 lent nodes with 2,000 jobs", "20 ms", _recall_time(crowded=True)
    yield "the same with room to move to", "20 ms", _recall_time(crowded=False)


def _knapsack_ratios(count: int) -> Iterator[float]:
    """Return the time saved by the exact solver relative to ours."""
    for make in (any_order, falling, curve, nodes, alike):
        random = Random(make.__name__)
        for _ in range(count):
            groups = {f"j{at}": make(random) for at in range(random.randint(1, 10))}
            budget = random.randint(0, 60)
            counts = solve_knapsack(groups, budget)
            chosen = [next(item for item in items if item.gpus == counts[job]) for job, items in groups.items()]
            first_s = sum(items[0].remaining_s for items in groups.values())
            yield _ratio(best_s(groups, budget), first_s - sum(item.remaining_s for item in chosen))


def _knapsack_time(groups: int, items: int, budget: int) -> str:
    """Create groups: half follow a curve over every count, half have gaps and gains in any order."""

    def instance(random: Random) -> dict[str, list[Item]]:
        return {f"j{at}": (_increasing_group if at % 2 else _irregular_group)(random, items) for at in range(groups)}

    instances = [instance(Random(seed)) for seed in range(10)]
    return _time_calls([partial(solve_knapsack, groups, budget) for groups in instances])


def _increasing_group(random: Random, count: int) -> list[Item]:
    least, work_s, power = random.choice((1, 2, 4, 8)), random.expovariate(1e-4), random.uniform(0.6, 1.0)
    return [Item(gpus, work_s / gpus**power) for gpus in range(least, least + count)]


def _irregular_group(random: Random, count: int) -> list[Item]:
    counts = sorted(random.sample(range(1, 41), count))
    return [Item(gpus, random.uniform(0.0, 1e4)) for gpus in counts]


def _recall_ratios(count: int, crowded: bool) -> Iterator[float]:
    random = Random(11 + crowded)
    for _ in range(count):
        lent = random.randint(2, 12)
        snapshot, leaving = a_lent_fleet(random, lent, crowded=crowded), random.randint(1, lent - 1)
        found = least_preemption_cost(snapshot, "inference", RecallNeed(leaving), SETTINGS)
        unused = [name for name in snapshot.loans if not is_usable(snapshot, name)]
        lost_gpu_s, more = build_cost_function(snapshot), max(0, leaving - len(unused))
        choices = combinations(sorted(snapshot.loans.keys() - unused), more)
        yield _ratio(lost_gpu_s(found), min(map(lost_gpu_s, choices)))


def _milp_ratios(count: int, lent: int, leaving: int) -> Iterator[float]:
    """Compare on fleets without free GPUs to move to, which the exact model omits."""
    for seed in range(count):
        snapshot = a_lent_fleet(Random(seed), lent, crowded=True)
        used = sorted(name for name in snapshot.loans if is_usable(snapshot, name))
        cost = RecallCost(build_recall_cost(snapshot, used, SETTINGS).jobs, [("", 0)] * len(used), {})
        yield _ratio(cost.compute(find_cheapest_nodes(cost, leaving)), _lower_bound_gpu_s(cost, leaving))


def _lower_bound_gpu_s(cost: RecallCost, count: int) -> float:
    """Return the lower bound that HiGHS proves for the cost of emptying `count` nodes."""
    program = MilpModel()
    leaves = program.add_columns(np.zeros(len(cost.nodes)), integer=True)
    program.add_row((leaves, 1.0), lower=count, upper=count)
    for tenant in cost.jobs:
        touched, restarts = program.add_columns([0.0]), program.add_columns([1.0], upper=inf)
        preempted = program.add_columns([tenant.preempt_gpu_s], integer=True)
        here, gpus, whole_s = (
            leaves[list(tenant.gpus_by_node)],
            list(tenant.gpus_by_node.values()),
            tenant.restart_s * tenant.held_gpus,
        )
        for node in here:
            program.add_row((touched, 1.0), ([node], -1.0), lower=0.0)
        program.add_row(
            (here, gpus), (preempted, -float(max(0, sum(gpus) - tenant.spare_gpus))), upper=tenant.spare_gpus
        )
        shrunk_s = [tenant.restart_s * each for each in gpus]
        program.add_row((restarts, 1.0), (here, shrunk_s), (touched, -whole_s), (preempted, whole_s), lower=0.0)
    return program.solve(time_limit_s=MILP_LIMIT_S, cutoff=inf).bound


def _recall_time(*, crowded: bool) -> str:
    snapshot = build_large_fleet(Random(1), 1_000, 2_000, crowded=crowded)
    return _time_calls([lambda: least_preemption_cost(snapshot, "inference", RecallNeed(100), SETTINGS)] * 10)


def build_large_fleet(random: Random, lent: int, jobs: int, *, crowded: bool) -> Snapshot:
    """Create jobs on one to three nodes. In a crowded fleet they hold every GPU."""
    free = {f"i{at}": 8 for at in range(lent)}
    shares: list[Counter[str]] = []
    while len(shares) < jobs:
        names = random.sample(list(free), random.choice((1, 1, 1, 2, 3)))
        share = Counter({name: gpus for name in names if (gpus := random.choice((1, 2, 4))) <= free[name]})
        if share:
            shares.append(share)
            free.update({name: free[name] - gpus for name, gpus in share.items()})
    if crowded:
        last = {name: share for share in shares for name in share}
        for name, gpus in free.items():
            last.get(name, shares[0])[name] += gpus
    held: Counter[str] = Counter()
    tenants = []
    for number, share in enumerate(shares):
        tenants.append(a_job_on(random, number, {name: (held[name], gpus) for name, gpus in share.items()}))
        held.update(share)
    loans = [a_loan(name) for name in free]
    return a_snapshot(a_fleet(training=0, inference=lent), tenants, loans, now_s=NOW_S)


def _ratio(one: float, other: float) -> float:
    return 1.0 if abs(one - other) <= 1e-6 * max(1.0, abs(other)) else one / other if other else inf


def _ratios(ratios: Sequence[float]) -> str:
    exact = sum(ratio == 1.0 for ratio in ratios)
    return f"mean {mean(ratios):.4f}, worst {max(ratios):.3f}, exact {exact} of {len(ratios)}"


def _time_calls(calls: Sequence[Callable[[], object]]) -> str:
    """Return the CPU time of each call after one warm-up call."""
    calls[0]()
    taken_ms = []
    for call in calls:
        begin_s = process_time()
        call()
        taken_ms.append(1e3 * (process_time() - begin_s))
    return f"median {median(taken_ms):.1f} ms, worst {max(taken_ms):.1f} ms"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row), flush=True)
