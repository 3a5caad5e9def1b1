"""Gauges of the current cluster state, computed from a snapshot at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from scheduler.domain.fleet import LIVE_LOAN_STATES, LoanState, Node, NodeState, PoolKind
from scheduler.domain.job_state import ENDED_STATES, JobState
from scheduler.domain.machine import Machine
from scheduler.domain.snapshot import Snapshot
from scheduler.package_version import get_package_version
from scheduler.scheduling.policies.lending import demand_lost_at_s
from scheduler.scheduling.policies.settings import PolicySettings

_LENT = (LoanState.ACTIVE, LoanState.RECALLED)
_GPU_KINDS = ("own", "lent")
_GPU_STATES = ("training", "inference", "other", "idle", "down")
NODE_STATES = ("up", "offered", "active", "recalled", "cordoned", "draining", "quarantined", "down")
"""States of a node or of its loan. `ebbtide_node_state` is the index."""
_DEFAULT_POLICY_SETTINGS = PolicySettings()
LabelCounts = Counter[tuple[str, ...]]


class FleetGauges:
    """Collector of all gauges for one scrape.

    Args:
        has_leader: whether the lease of some controller is live.
        by_job: whether to add series for each running job, whose number is not bounded.
        clock_lead_s: how far the latest committed state is ahead of this process's clock, 0 if it is not.
        policy_settings: values for pools that set none of their own.
        machines: joined machines.
        silent_after_s: time without a report after which a machine counts as silent.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        has_leader: bool,
        inbox_size: int,
        by_job: bool = False,
        clock_lead_s: float = 0.0,
        policy_settings: PolicySettings = _DEFAULT_POLICY_SETTINGS,
        machines: Iterable[Machine] = (),
        silent_after_s: float = 120.0,
    ) -> None:
        self._snapshot = snapshot
        self._has_leader = has_leader
        self._inbox_size = inbox_size
        self._by_job = by_job
        self._clock_lead_s = clock_lead_s
        self._policy_settings = policy_settings
        self._machines = machines
        self._silent_after_s = silent_after_s

    def collect(self) -> Iterable[Metric]:
        holdings = _GpuHoldings(self._snapshot)
        yield from self._collect_fleet(holdings)
        yield self._collect_node_states()
        yield self._collect_machines()
        yield from self._collect_loans()
        yield _build_labelled_gauge(
            "ebbtide_jobs", "Number of jobs that have not ended, by state.", ("state",), holdings.jobs_by_state
        )
        yield from self._collect_queues(holdings)
        yield from self._collect_demand()
        yield from self._collect_serving()
        yield from self._collect_shortages()
        yield from self._collect_shadows()
        if self._by_job:
            yield from self._collect_running_jobs()
        yield _build_gauge(
            "ebbtide_snapshot_generation",
            "Number of the latest committed state. It grows with each commit.",
            self._snapshot.generation,
        )
        yield _build_gauge(
            "ebbtide_clock_lead_seconds",
            "Seconds by which the latest committed state is in the future, 0 if it is not. A clock was wrong.",
            self._clock_lead_s,
        )
        yield _build_gauge("ebbtide_inbox_commands", "User requests that the next tick will apply.", self._inbox_size)
        yield _build_gauge("ebbtide_leader", "1 while the lease of some controller is live.", int(self._has_leader))
        info = GaugeMetricFamily("ebbtide_build_info", "Always 1. The label is the version.", labels=["version"])
        info.add_metric([get_package_version()], 1)
        yield info

    def _collect_fleet(self, holdings: _GpuHoldings) -> Iterator[Metric]:
        gpus: LabelCounts = Counter()
        nodes: LabelCounts = Counter()
        for pool in self._snapshot.pools:
            gpus.update({(pool, state): 0 for state in _GPU_STATES})
        for node in self._snapshot.nodes.values():
            nodes[node.pool, self._get_node_state(node)] += 1
            for state, count in _count_gpu_states(node, holdings.gpus_by_node.get(node.name, 0)):
                if count:
                    gpus[node.pool, state] += count
        yield _build_labelled_gauge(
            "ebbtide_gpus",
            "Number of GPUs by home pool and use: training, inference, other, idle or down.",
            ("pool", "state"),
            gpus,
        )
        yield _build_labelled_gauge(
            "ebbtide_nodes",
            "Number of hosts by home pool: up, cordoned, draining, quarantined, down, or the state of their loan.",
            ("pool", "state"),
            nodes,
        )

    def _collect_node_states(self) -> Metric:
        family = GaugeMetricFamily(
            "ebbtide_node_state",
            "State of each host as a number: " + ", ".join(f"{at} {name}" for at, name in enumerate(NODE_STATES)) + ".",
            labels=["pool", "node"],
        )
        for node in self._snapshot.nodes.values():
            family.add_metric([node.pool, node.name], NODE_STATES.index(self._get_node_state(node)))
        return family

    def _collect_machines(self) -> Metric:
        counts: LabelCounts = Counter({("reporting",): 0, ("silent",): 0})
        for machine in self._machines:
            if machine.is_live:
                seen_at_s = machine.joined_at_s if machine.seen_at_s is None else machine.seen_at_s
                is_silent = self._snapshot.now_s - seen_at_s > self._silent_after_s
                counts["silent" if is_silent else "reporting",] += 1
        text = "Joined machines by whether their agents report. Pods of Kubernetes jobs are not machines."
        return _build_labelled_gauge("ebbtide_machines", text, ("state",), counts)

    def _get_node_state(self, node: Node) -> str:
        if node.state is NodeState.DOWN:
            return "down"
        if node.quarantine:
            return "quarantined"
        if node.cordoned:
            return "draining" if node.draining else "cordoned"
        loan = self._snapshot.loans.get(node.name)
        return loan.state.value if loan is not None and loan.is_in_effect else "up"

    def _collect_loans(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        states: LabelCounts = Counter({(state.value,): 0 for state in LIVE_LOAN_STATES})
        lenders = [pool.name for pool in snapshot.pools.values() if pool.kind is PoolKind.INFERENCE]
        lent: LabelCounts = Counter({(name,): 0 for name in lenders})
        for loan in snapshot.loans.values():
            if loan.is_live:
                states[loan.state.value,] += 1
            lent[loan.pool,] += loan.count_gpus(snapshot.nodes[loan.node]) if loan.state in _LENT else 0
        yield _build_labelled_gauge(
            "ebbtide_loans",
            "Number of nodes that are proposed, offered, lent or being returned, by state of the loan.",
            ("state",),
            states,
        )
        yield _build_labelled_gauge("ebbtide_lent_gpus", "GPUs of nodes on loan to training.", ("pool",), lent)
        supply: LabelCounts = Counter({(name,): 0 for name in lenders})
        for node in [node for node in snapshot.nodes.values() if (node.pool,) in supply]:
            supply[node.pool,] += snapshot.count_inference_gpus(node)
        text = "GPUs available to inference, without lent nodes and free GPUs of cordoned nodes."
        yield _build_labelled_gauge("ebbtide_inference_supply_gpus", text, ("pool",), supply)
        paused, pools = snapshot.switches.lending_paused, snapshot.pools
        rules = {name: pools[name].lending for name in lenders}
        may_lend: LabelCounts = Counter(
            {(name,): int(each.enabled and not each.is_shadow and not paused) for name, each in rules.items()}
        )
        text = "1 if the pool may lend and lending is not paused, 0 otherwise."
        yield _build_labelled_gauge("ebbtide_lending_enabled", text, ("pool",), may_lend)

    def _collect_queues(self, holdings: _GpuHoldings) -> Iterator[Metric]:
        text = "GPUs held by jobs, by declared queue and kind: owned by training, or lent."
        yield _build_labelled_gauge("ebbtide_queue_gpus", text, ("queue", "kind"), holdings.gpus_by_queue)
        declared, allocated = self._snapshot.queues.items(), holdings.allocated_by_queue
        guaranteed: LabelCounts = Counter({(name,): queue.guaranteed_gpus for name, queue in declared})
        borrowed = Counter({name: max(0, count - guaranteed[name]) for name, count in allocated.items()})
        for name, text, counts in (
            ("ebbtide_queue_guaranteed_gpus", "Number of GPUs reserved for the jobs of a declared queue.", guaranteed),
            ("ebbtide_queue_allocated_gpus", "GPUs allocated to placed jobs of a queue.", allocated),
            ("ebbtide_queue_borrowed_gpus", "Allocated GPUs above the guarantee of a queue.", borrowed),
        ):
            yield _build_labelled_gauge(name, text, ("queue",), counts)

    def _collect_running_jobs(self) -> Iterator[Metric]:
        """Yield one series per running job. Jobs that do not run have no progress."""
        snapshot = self._snapshot
        running = [job for job in snapshot.jobs.values() if job.state is JobState.RUNNING]
        yield _build_job_gauge(
            "ebbtide_job_steps",
            "Optimizer steps that a running job has done, extrapolated to now.",
            {job.id: job.steps_at(snapshot.now_s) for job in running if job.has_reported},
        )
        yield _build_job_gauge(
            "ebbtide_job_loss", "Last reported loss of a running job.", {job.id: job.progress.loss for job in running}
        )
        speeds = {job.id: job.progress.samples_per_s for job in running}
        yield _build_job_gauge(
            "ebbtide_job_samples_per_s", "Measured throughput of a running job, in samples per second.", speeds
        )
        peaks = {job.id: job.progress.peak_bytes for job in running}
        yield _build_job_gauge(
            "ebbtide_job_peak_bytes", "Largest GPU memory use of any rank of a running job, in bytes.", peaks
        )

    def _collect_demand(self) -> Iterator[Metric]:
        demand = GaugeMetricFamily(
            "ebbtide_inference_demand_gpus",
            "GPUs needed by inference, at most the capacity of the pool.",
            labels=["pool"],
        )
        for pool, reading in self._snapshot.demand.items():
            demand.add_metric([pool], reading.gpus)
        yield demand
        age = GaugeMetricFamily(
            "ebbtide_demand_age_seconds", "Seconds since the last demand reading of a pool.", labels=["pool"]
        )
        for pool, reading in self._snapshot.demand.items():
            age.add_metric([pool], max(0.0, self._snapshot.now_s - reading.at_s))
        yield age
        lost = GaugeMetricFamily(
            "ebbtide_demand_lost",
            "1 if a pool's readings are so old that all its loans are recalled, 0 otherwise.",
            labels=["pool"],
        )
        for name, rules in self._snapshot.pools.items():
            if (found := self._snapshot.demand.get(name)) is not None:
                lost_at_s = demand_lost_at_s(rules, found, self._policy_settings)
                lost.add_metric([name], int(self._snapshot.now_s >= lost_at_s))
        yield lost
        forecast_gpus = GaugeMetricFamily(
            "ebbtide_forecast_gpus",
            "Forecast of the largest demand within the horizon, in GPUs, by quantile.",
            labels=["pool", "quantile"],
        )
        for pool, forecast in self._snapshot.forecasts.items():
            for quantile, gpus in zip(forecast.quantiles, forecast.gpus, strict=True):
                forecast_gpus.add_metric([pool, f"{quantile:g}"], gpus)
        yield forecast_gpus

    def _collect_serving(self) -> Iterator[Metric]:
        rate = GaugeMetricFamily(
            "ebbtide_serving_requests_per_second",
            "Reported request rate of a model, in requests per second.",
            labels=["pool", "model"],
        )
        needed = GaugeMetricFamily(
            "ebbtide_serving_needed_replicas",
            "Replicas of a model that meet its objective at the reported rate.",
            labels=["pool", "model"],
        )
        proposed = GaugeMetricFamily(
            "ebbtide_serving_proposed_replicas", "Replicas that are proposed for a model.", labels=["pool", "model"]
        )
        for pool, reading in self._snapshot.demand.items():
            for load in reading.loads:
                rate.add_metric([pool, load.model], load.rate_per_s)
                needed.add_metric([pool, load.model], load.replicas)
            for advice in reading.advice:
                proposed.add_metric([pool, advice.model], advice.replicas)
        yield from (rate, needed, proposed)

    def _collect_shortages(self) -> Iterator[Metric]:
        ratio = GaugeMetricFamily(
            "ebbtide_lending_shortage_ratio",
            "Share of five-minute intervals of the last four weeks in which loans left inference short.",
            labels=["pool"],
        )
        target = GaugeMetricFamily(
            "ebbtide_lending_shortage_target_ratio",
            "Share of intervals in which loans may leave inference short, for pools that promise one.",
            labels=["pool"],
        )
        budget = GaugeMetricFamily(
            "ebbtide_lending_budget_ratio", "Share of the promised short intervals that is left.", labels=["pool"]
        )
        for name, reading in self._snapshot.demand.items():
            ratio.add_metric([name], reading.shortages.short_ratio)
            pool = self._snapshot.pools.get(name)
            if pool is not None and pool.lending.shortage_target is not None:
                target.add_metric([name], pool.lending.shortage_target)
                budget.add_metric([name], reading.shortages.compute_budget_left(pool.lending.shortage_target))
        yield from (ratio, target, budget)

    def _collect_shadows(self) -> Iterator[Metric]:
        gpus = GaugeMetricFamily(
            "ebbtide_shadow_gpus", "GPUs of a pool in shadow mode that jobs would use on loan now.", labels=["pool"]
        )
        gpu_hours = GaugeMetricFamily(
            "ebbtide_shadow_gpu_hours",
            "GPU-hours that jobs would have used on loan since the pool entered shadow mode.",
            labels=["pool"],
        )
        for name, shadow in self._snapshot.shadows.items():
            gpus.add_metric([name], shadow.gpus)
            gpu_hours.add_metric([name], shadow.compute_gpu_s(self._snapshot.now_s) / 3600.0)
        yield from (gpus, gpu_hours)


class _GpuHoldings:
    """Counts of jobs and their GPUs, computed in one pass over the jobs.

    All undeclared queues share one series: clients may name any queue, so that their number is not bounded.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.jobs_by_state: LabelCounts = Counter(
            {(state.value,): 0 for state in JobState if state not in ENDED_STATES}
        )
        self.gpus_by_node: dict[str, int] = {}
        self.gpus_by_queue: LabelCounts = Counter({(name, kind): 0 for name in snapshot.queues for kind in _GPU_KINDS})
        self.allocated_by_queue: LabelCounts = Counter({(name,): 0 for name in snapshot.queues})
        lenders = {name for name, pool in snapshot.pools.items() if pool.kind is PoolKind.INFERENCE}
        kinds = {name: _GPU_KINDS[node.pool in lenders] for name, node in snapshot.nodes.items()}
        jobs = snapshot.jobs.values()
        for job in [job for job in jobs if job.allocation.target or job.allocation.releasing]:
            queue = job.spec.queue if job.spec.queue in snapshot.queues else ""
            self.allocated_by_queue[queue,] += job.allocation.target_gpus
            for gpus in (job.allocation.target, job.allocation.releasing):
                for node, indices in gpus.items():
                    self.gpus_by_node[node] = self.gpus_by_node.get(node, 0) + len(indices)
                    self.gpus_by_queue[queue, kinds[node]] += len(indices)
        states = Counter([job.state for job in jobs])
        self.jobs_by_state.update(
            {(state.value,): count for state, count in states.items() if state not in ENDED_STATES}
        )


def _count_gpu_states(node: Node, held: int) -> tuple[tuple[str, int], ...]:
    if node.state is NodeState.DOWN:
        return (("down", node.gpus),)
    inference = min(node.inference_gpus, node.gpus - held)
    other = min(node.other_gpus, node.gpus - held - inference)
    idle = node.gpus - held - inference - other
    return ("training", held), ("inference", inference), ("other", other), ("idle", idle)


def _build_job_gauge(name: str, text: str, values: Mapping[str, float | None]) -> Metric:
    """Build a gauge by job. Jobs without a value get no series."""
    family = GaugeMetricFamily(name, text, labels=["job"])
    for job_id, value in values.items():
        if value is not None:
            family.add_metric([job_id], value)
    return family


def _build_gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _build_labelled_gauge(name: str, text: str, labels: tuple[str, ...], counts: LabelCounts) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family
