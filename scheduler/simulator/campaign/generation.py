"""Draws a fault case from a seed: world, policy, settings, jobs, demand, and the rate of each fault.

Each part has its own generator, so that a change of one leaves the others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.fleet import Node, NodeState, Pool, PoolKind
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.executors.simulated_run import Delays
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import list_policy_sets
from scheduler.simulator.campaign.case import CaseEvent, CaseEventKind, CaseJob, DemandLevel, FaultCase
from scheduler.simulator.campaign.hardware import draw_demands, draw_nodes, draw_spares

QUEUES = ("lab", "team", "batch")
OWNERS = ("ada", "bob", "cyn")
DEMAND_PERIOD_S = 900.0
SQL_SHARE = 0.15
EBBTIDE_SHARE = 0.5
"""Share of the cases under the default policy. The others are spread over all policies."""
_GPU = "a100-80g"
_GIB = 2**30


def draw_case(seed: int) -> FaultCase:
    """Return the case of a seed."""
    random = Random(f"campaign/{seed}/world")
    uses_sql = random.random() < SQL_SHARE
    per_node = random.choice((2, 4, 8))
    pools = (Pool("training", PoolKind.TRAINING), Pool("inference", PoolKind.INFERENCE, _draw_lending(random)))
    nodes = tuple(
        Node(f"{prefix}{at}", pool, _GPU, per_node, 80 * _GIB, NodeState.UP)
        for prefix, pool, most in (("t", "training", 4), ("i", "inference", 3))
        for at in range(random.randint(1, most))
    )
    owned = per_node * sum(node.pool == "training" for node in nodes)
    hours = random.uniform(0.25, 0.6) if uses_sql else random.uniform(2.0, 6.0)
    end_s = 3600.0 * hours
    count, longest_s = random.randint(4, 8 if uses_sql else 24), 1200.0 if uses_sql else 4 * 3600.0
    policy_random = Random(f"campaign/{seed}/policy")
    nodes = draw_nodes(Random(f"campaign/{seed}/hardware"), nodes)
    nodes = tuple(_draw_lendable_gpus(Random(f"campaign/{seed}/partial"), nodes))
    jobs = _draw_jobs(Random(f"campaign/{seed}/jobs"), owned, end_s, count=count, longest_s=longest_s)
    return FaultCase(
        seed=seed,
        policy="ebbtide" if policy_random.random() < EBBTIDE_SHARE else policy_random.choice(list_policy_sets()),
        settings=_draw_settings(policy_random),
        pools=pools,
        nodes=nodes,
        queues=tuple(_draw_queues(Random(f"campaign/{seed}/queues"), owned)),
        jobs=tuple(draw_demands(Random(f"campaign/{seed}/demands"), jobs, nodes)),
        demand=tuple(_draw_demand(Random(f"campaign/{seed}/demand"), nodes, end_s)),
        events=_draw_events(seed, owned, end_s),
        delays=Delays(
            start_s=random.choice((0.0, 5.0, 30.0)),
            reconfiguration_s=random.choice((3.0, 30.0, 120.0)),
            drain_s=random.choice((0.0, 20.0, 120.0)),
        ),
        faults_end_s=end_s,
        uses_sql=uses_sql,
        spares=tuple(draw_spares(Random(f"campaign/{seed}/spares"), nodes)),
    )


def _draw_lending(random: Random) -> LendingPolicy:
    return LendingPolicy(
        return_deadline_s=random.choice((60.0, 300.0, 600.0)),
        cold_start_s=random.choice((0.0, 300.0)),
        headroom=random.choice((0.0, 0.1)),
        enabled=random.random() < 0.9,
    )


def _draw_lendable_gpus(random: Random, nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes. In a part of the cases, some of the inference nodes lend only some of their GPUs."""
    share = random.choice((0.0, 0.0, 0.5, 1.0))
    for node in nodes:
        indices = sorted(random.sample(range(node.gpus), random.randint(1, node.gpus - 1)))
        is_partial = node.pool == "inference" and random.random() < share
        yield replace(node, lendable_gpus=tuple(indices)) if is_partial else node


def _draw_settings(random: Random) -> PolicySettings:
    return PolicySettings(
        full_pass_period_s=random.choice((120.0, 300.0)),
        leave_grace_s=random.choice((10.0, 60.0)),
        ageing_s=random.choice((600.0, 3600.0)),
        resize_pause_s=random.choice((0.0, 120.0)),
        run_time_min_s=random.choice((0.0, 600.0)),
        las_promote_ratio=random.choice((0.0, 2.0)),
        lending_reserve=random.choice((0.0, 0.25)),
    )


def _draw_queues(random: Random, owned: int) -> Iterator[JobQueue]:
    """Yield queues whose limits admit every job alone, so that no job waits for ever."""
    left = owned
    for name in (*QUEUES, "default"):
        if random.random() < 0.4:
            continue
        guaranteed = random.randint(0, left) if random.random() < 0.7 else 0
        left -= guaranteed
        limit = random.choice((None, owned, owned + 2, 2 * owned))
        user_limit = random.choice((None, None, owned))
        yield JobQueue(name, guaranteed, limit, random.choice((1.0, 3.0)), user_limit)


def _draw_jobs(random: Random, owned: int, end_s: float, *, count: int, longest_s: float) -> Iterator[CaseJob]:
    for number in range(count):
        least = min(owned, random.choice((1, 1, 1, 2, 2, 4, 8)))
        most = least * random.choice((1, 1, 2, 4, 8))
        seconds = min(longest_s, max(30.0, 2000.0 * random.lognormvariate(0.0, 1.2)))
        steps = max(1, round(seconds * least))
        spec = JobSpec(
            name=f"job-{number}",
            min_gpus=least,
            max_gpus=most,
            queue=random.choice((*QUEUES, "default", "invented")),
            priority=random.choice((0, 0, 0, 5)),
            steps=0 if random.random() < 0.15 else steps,
            deadline_s=random.choice((None, None, None, 60.0, 2.0 * seconds)),
            retries=1_000_000,
            fungible=random.random() < 0.9,
            checkpoint=CheckpointSpec(interval_s=random.choice((120.0, 900.0))),
            on_resize=random.choice((OnResize.CHECKPOINT, OnResize.CHECKPOINT, OnResize.RESTART, OnResize.NEVER)),
        )
        yield CaseJob(f"j{number:02d}", random.uniform(0.0, 0.8 * end_s), spec, random.choice(OWNERS), float(steps))


def _draw_demand(random: Random, nodes: tuple[Node, ...], end_s: float) -> Iterator[DemandLevel]:
    gpus = sum(node.gpus for node in nodes if node.pool == "inference")
    phase, period_s = random.uniform(0.0, 2.0 * math.pi), random.uniform(1.0, 6.0) * 3600.0
    for at in range(int(end_s / DEMAND_PERIOD_S) + 1):
        wave = 0.5 + 0.45 * math.sin(2.0 * math.pi * at * DEMAND_PERIOD_S / period_s + phase)
        yield DemandLevel(at * DEMAND_PERIOD_S, "inference", min(gpus, max(0.0, gpus * wave * random.gauss(1.0, 0.1))))


_COMMANDS_FROM = list(CaseEventKind).index(CaseEventKind.CANCEL)
_AMOUNTS_S = {
    CaseEventKind.NODE_LOSS: 1200.0,
    CaseEventKind.SLOW_CHECKPOINT: 240.0,
    CaseEventKind.STORE_OUTAGE: 60.0,
    CaseEventKind.SLOW_COMMIT: 20.0,
    CaseEventKind.LEADER_PAUSE: 60.0,
    CaseEventKind.LEADER_CRASH: 30.0,
    CaseEventKind.OBSERVE_ERROR: 10.0,
    CaseEventKind.CONVERGE_ERROR: 10.0,
    CaseEventKind.CLOCK_FORWARD: 600.0,
    CaseEventKind.CLOCK_BACK: 600.0,
    CaseEventKind.LOST_REPORT: 120.0,
    CaseEventKind.DUPLICATE_REPORT: 120.0,
    CaseEventKind.SUSPEND: 900.0,
    CaseEventKind.DRAIN: 1200.0,
    CaseEventKind.RECALL_ALL: 1200.0,
    CaseEventKind.FREEZE_RESIZES: 900.0,
    CaseEventKind.OUT_OF_MEMORY: 0.0,
    CaseEventKind.REMOVE_NODE: 1200.0,
}
"""Mean duration or extent of an event by kind. Other kinds need none."""


def _draw_events(seed: int, owned: int, end_s: float) -> tuple[CaseEvent, ...]:
    """Return events of each kind at a rate of its own: a third of the kinds do not occur in a case."""
    events: list[CaseEvent] = []
    for position, kind in enumerate(CaseEventKind):
        random = Random(f"campaign/{seed}/{kind}")
        if random.random() < 1 / 3:
            continue
        gap_s = end_s / (random.uniform(0.5, 4.0) if position >= _COMMANDS_FROM else random.uniform(0.5, 8.0))
        at_s = random.expovariate(1.0 / gap_s)
        while at_s < end_s:
            mean_s = _AMOUNTS_S.get(kind, 0.0)
            low = random.randint(1, owned)
            amount = random.expovariate(1.0 / mean_s) if mean_s else float(random.randint(1, 3))
            events.append(CaseEvent(at_s, kind, random.random(), amount, low, random.randint(low, 2 * owned)))
            at_s += random.expovariate(1.0 / gap_s)
    return tuple(sorted(events, key=lambda event: (event.at_s, event.kind)))
