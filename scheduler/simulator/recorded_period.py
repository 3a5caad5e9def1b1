"""Input files of a simulation that replays what a service recorded: its pools, jobs and demand.

A simulated pool has equal nodes, and its demand is a step function with one value every five minutes. A job has the
work that it did, so that the simulated time is about as long as the recorded one.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from scheduler.documents.trace_files import export_trace, format_demand_csv, format_jobs_csv
from scheduler.documents.trace_formats import JobRow
from scheduler.domain.fleet import DemandReading, Node, Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.simulation_task import SimulationFiles
from scheduler.domain.snapshot import Snapshot
from scheduler.solver.profiles.catalog import list_gpu_names, list_model_names

DEMAND_STEP_S = 300.0
_LENDING_FIELDS = (
    *("enabled", "shortage_target", "quantile", "headroom", "return_deadline_s", "cold_start_s", "kept_nodes_min"),
    *("lent_nodes_max", "loan_s_min", "demand_stale_s", "demand_lost_s"),
)
"""Limits of loans that hold at any time. Blackouts and known events belong to a calendar, which a replay lacks."""


@dataclass(frozen=True, slots=True)
class RecordedPeriod:
    """Files that replay a period, the number of jobs in them, and what differs from the recorded cluster."""

    files: SimulationFiles
    jobs: int
    differences: tuple[str, ...]


class NothingRecordedError(ValueError):
    """Nothing was recorded that can be simulated. The message says what is missing."""


def build_recorded_period(
    snapshot: Snapshot,
    jobs: Iterable[Job],
    readings: Mapping[str, Sequence[DemandReading]],
    *,
    from_s: float,
    to_s: float,
) -> RecordedPeriod:
    """Build the input files from the present fleet, and the jobs and demand between `from_s` and `to_s`.

    Args:
        jobs: live and ended jobs. Jobs that were submitted at other times are left out.
        readings: demand readings by pool, in order of time.

    Raises:
        NothingRecordedError: nothing can be simulated.
    """
    submitted = [job for job in jobs if from_s <= job.submitted_at_s <= to_s]
    differences, pools = list[str](), list[dict[str, Any]]()
    demand = dict[str, list[DemandReading]]()
    for name, pool in sorted(snapshot.pools.items()):
        nodes = [node for node in snapshot.nodes.values() if node.pool == name]
        if not nodes:
            continue
        pools.append(_describe_pool(pool, nodes, differences))
        if pool.kind is PoolKind.INFERENCE:
            known = readings.get(name) or (_assume_full_demand(pools[-1], from_s, differences),)
            demand[name] = _resample(known, from_s, to_s)
    if not any(pool["kind"] == PoolKind.TRAINING for pool in pools):
        raise NothingRecordedError("the fleet has no node in a training pool. Add one to compare policies on it")
    measured = [_with_measured_work(job, snapshot.now_s) for job in submitted]
    trace = export_trace(measured, demand, snapshot.now_s)
    models = {pool["gpu"] for pool in pools if pool["kind"] == PoolKind.TRAINING}
    rows = [_with_known_profiles(row) for row in trace.jobs if row.gpu in ("", *models)]
    if not rows:
        raise NothingRecordedError("no job that was submitted in this time has run. Compare again after jobs have run")
    if left_out := len(submitted) - len(rows):
        differences.append(f"{left_out} of {len(submitted)} jobs are left out: they never ran, or need other GPUs")
    cluster = {"pools": pools, "queues": list(_describe_queues(snapshot))}
    demand_text = format_demand_csv(trace.demand) if trace.demand else ""
    files = SimulationFiles(format_jobs_csv(rows), demand_text, json.dumps(cluster))
    return RecordedPeriod(files, len(rows), tuple(differences))


def _describe_pool(pool: Pool, nodes: Sequence[Node], differences: list[str]) -> dict[str, Any]:
    """Return the pool in the form of a cluster file, with equal nodes of its most common kind."""
    kinds = Counter((node.gpu, node.gpus) for node in nodes)
    (gpu, gpus), count = kinds.most_common(1)[0]
    if len(kinds) > 1:
        count = max(1, round(sum(node.gpus for node in nodes) / gpus))
        differences.append(f"pool {pool.name} has unlike nodes; {count} nodes with {gpus} {gpu} stand for them")
    described = {"name": pool.name, "kind": pool.kind.value, "nodes": count, "gpus_per_node": gpus, "gpu": gpu}
    if pool.kind is PoolKind.TRAINING:
        return described
    described |= _describe_parts(pool, [node for node in nodes if node.gpus == gpus], differences)
    return described | {"lending": {name: getattr(pool.lending, name) for name in _LENDING_FIELDS}}


def _describe_parts(pool: Pool, nodes: Sequence[Node], differences: list[str]) -> dict[str, int]:
    """Return how many GPUs loans of a part of a node take, and of how many nodes. Empty if all are lent whole."""
    parts = Counter(len(node.lendable_gpus) for node in nodes if node.lendable_gpus)
    if not parts:
        return {}
    gpus, count = parts.most_common(1)[0][0], parts.total()
    if len(parts) > 1:
        differences.append(f"pool {pool.name} lends unlike parts of nodes; {count} parts of {gpus} GPUs stand for them")
    return {"lendable_gpus": gpus, "partial_nodes": count}


def _describe_queues(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    for name, queue in sorted(snapshot.queues.items()):
        yield {"name": name, **queue.quota}


def _assume_full_demand(pool: Mapping[str, Any], from_s: float, differences: list[str]) -> DemandReading:
    """Return a reading for a pool without any: nothing shows that one of its nodes could have been lent."""
    capacity = pool["nodes"] * pool["gpus_per_node"]
    differences.append(f"pool {pool['name']} has no recorded demand; it is taken to need all its {capacity} GPUs")
    return DemandReading(from_s, float(capacity), float(capacity))


def _resample(readings: Sequence[DemandReading], from_s: float, to_s: float) -> list[DemandReading]:
    """Return one reading for each step. Each holds until the next; before the first one, the first one holds."""
    steps = max(1, int((to_s - from_s) / DEMAND_STEP_S))
    resampled = list[DemandReading]()
    for step in range(steps):
        at_s = from_s + step * DEMAND_STEP_S
        latest = readings[max(0, bisect_right(readings, at_s, key=attrgetter("at_s")) - 1)]
        resampled.append(DemandReading(at_s, latest.gpus, latest.asked_gpus))
    return resampled


def _with_measured_work(job: Job, now_s: float) -> Job:
    """Return the job as if it had ended, after the steps that it has done so far and without a declared length."""
    settled = job if job.is_ended else replace(job.advance_to(now_s), state=JobState.SUCCEEDED, state_since_s=now_s)
    return replace(settled, spec=replace(job.spec, steps=0))


def _with_known_profiles(row: JobRow) -> JobRow:
    """Return the row without names of profiles that only this service has: the simulation has the built-in ones."""
    ran_on = row.ran_on if row.ran_on in list_gpu_names() else ""
    if row.model in ("", *list_model_names()):
        return replace(row, ran_on=ran_on)
    return replace(row, ran_on=ran_on, model="", global_batch=0, sequence_length=0, iterations=0)
