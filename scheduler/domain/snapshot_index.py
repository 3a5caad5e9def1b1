"""Index of a snapshot: which job holds which GPU, which GPUs are free, and which jobs, nodes and loans need attention.

The index is built once and then updated change by change, because a tick that scans all nodes and jobs for each lookup
is ten times slower. It adds nothing to the snapshot's value: `SnapshotIndex.build` creates an equal index from the
snapshot alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from scheduler.domain.fleet import (
    LENT_STATES,
    UNRECALLED_LOAN_STATES,
    Loan,
    LoanState,
    Node,
    NodeState,
    Pool,
    PoolKind,
    count_taken_gpus,
    count_training_gpus,
)
from scheduler.domain.gpu_sets import NO_GPUS, FreeGpus, Gpus
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.node_fit import FitCache
from scheduler.domain.relative_speed import choose_reference_gpu
from scheduler.domain.standby import StandbyPhase

if TYPE_CHECKING:
    from scheduler.domain.snapshot import Snapshot


K = TypeVar("K")
GpuKind = tuple[str, bool]
"""GPU model, and whether the node is lent."""
GpuHolders = dict[str, Mapping[int, str]]
"""Job id by node and GPU index. GPUs that are being released count as held."""

_NODE_SETS = (
    "down", "cordoned", "draining", "must_vacate", "held_without_loan", "with_incidents", "serving", "with_capacity",
    "withheld", "wake_failed", "outdated_loans", "overused_loans",
)  # fmt: skip
_LOAN_SETS = ("offered", "recalled", "proposed")
_JOB_SETS = (
    "waiting", "running", "unsettled", "intent_candidates", "releasing", "out_of_range", "elastic", "above_minimum",
    "below_maximum", "profiled", "time_limited", "needs_new_plan",
)  # fmt: skip
_COUNTERS = (
    "free_gpus", "training_gpus", "node_counts_by_size", "up_node_counts", "unrecalled_loan_counts",
    "live_loan_counts", "unrecalled_loan_gpus", "live_loan_gpus", "lent_gpus", "inference_capacity", "owned_gpus",
)  # fmt: skip
_MUTABLE_ATTRIBUTES = (*_NODE_SETS, *_LOAN_SETS, *_JOB_SETS, *_COUNTERS, "holders", "free_by_node")


class SnapshotIndex:
    """Sets of names, and counts by kind of GPU, by pool or by node size.

    Only the creator of an index may change it, by `put_job`, `put_loan` and `update_to`.

    Nodes, by name:
        down, cordoned, draining: as in `Node`
        must_vacate: held by jobs that must leave
        with_incidents: have failed or slowed jobs
        held_without_loan: held by jobs although the node belongs to an inference pool and is not lent
        serving: training may start ranks there
        with_capacity: with a known capacity
        withheld: not lendable
        wake_failed: with a standby replica that did not wake
        outdated_loans: with a loan of other GPUs than are lendable now
        overused_loans: with a partial loan in effect and inference on more GPUs than the loan leaves to it
    Loans, by node name:
        offered, recalled, proposed: in this state
    Jobs, by id:
        waiting: queued
        running: running
        unsettled: in any other state
        intent_candidates: with an intent, a run time limit or a state that the intent step must examine
        releasing: with GPUs that are not observed free yet
        out_of_range: running on fewer GPUs than the minimum or more than the maximum
        elastic: running, with a range of GPUs
        above_minimum, below_maximum: running, on more than the minimum or fewer than the maximum
        profiled: live, with a model
        time_limited: live, with a maximum run time
        needs_new_plan: live, under a plan for fewer frozen layers
    Counts:
        free_gpus, training_gpus: GPUs that are free, or that accept training, by kind
        node_counts_by_size: nodes, by GPU model and GPUs per node
        up_node_counts: (GPUs per node, GPUs that its loan takes, number of nodes that are up), by pool
        unrecalled_loan_counts, unrecalled_loan_gpus: loans that are offered or active, and their GPUs, by pool
        live_loan_counts, live_loan_gpus: loans that are not returned, and their GPUs, by pool
        lent_gpus: GPUs of loans that are active or recalled, by pool
        inference_capacity: GPUs that inference can use, by pool
        owned_gpus: GPUs of training pools, up or not, by GPU model
    GPU models:
        reference_gpu: the most common one of training pools, or empty if these have no nodes
        has_reference_only: whether no node has another model
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.pools = pools
        self.nodes: Mapping[str, Node] = {}
        self.loans: Mapping[str, Loan] = {}
        self.jobs: Mapping[str, Job] = {}
        self.free_gpu_total = 0
        self.holders: GpuHolders = {}
        self.free_by_node: dict[str, FreeGpus] = {}
        self.down: set[str] = set()
        self.cordoned: set[str] = set()
        self.draining: set[str] = set()
        self.must_vacate: set[str] = set()
        self.held_without_loan: set[str] = set()
        self.with_incidents: set[str] = set()
        self.serving: set[str] = set()
        self.with_capacity: set[str] = set()
        self.withheld: set[str] = set()
        self.wake_failed: set[str] = set()
        self.outdated_loans: set[str] = set()
        self.overused_loans: set[str] = set()
        self.offered: set[str] = set()
        self.recalled: set[str] = set()
        self.proposed: set[str] = set()
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.unsettled: set[str] = set()
        self.intent_candidates: set[str] = set()
        self.releasing: set[str] = set()
        self.out_of_range: set[str] = set()
        self.elastic: set[str] = set()
        self.above_minimum: set[str] = set()
        self.below_maximum: set[str] = set()
        self.profiled: set[str] = set()
        self.time_limited: set[str] = set()
        self.needs_new_plan: set[str] = set()
        self.free_gpus: dict[GpuKind, int] = {}
        self.training_gpus: dict[GpuKind, int] = {}
        self.node_counts_by_size: dict[tuple[str, int], int] = {}
        self.up_node_counts: dict[str, tuple[tuple[int, int, int], ...]] = {}
        self.unrecalled_loan_counts: dict[str, int] = {}
        self.live_loan_counts: dict[str, int] = {}
        self.unrecalled_loan_gpus: dict[str, int] = {}
        self.live_loan_gpus: dict[str, int] = {}
        self.lent_gpus: dict[str, int] = {}
        self.inference_capacity: dict[str, int] = {}
        self.owned_gpus: dict[str, int] = {}
        self.reference_gpu = ""
        self.has_reference_only = True
        self.fit_cache = FitCache()
        self.fleet_version = object()
        self._job_id_sets: list[set[str]] = [getattr(self, name) for name in _JOB_SETS]

    @classmethod
    def build(cls, snapshot: Snapshot) -> SnapshotIndex:
        """Build the index of a snapshot from nothing."""
        ledger = cls(snapshot.pools)
        ledger.update_to(snapshot)
        return ledger

    def matches(self, snapshot: Snapshot) -> bool:
        """Return whether this is the index of the snapshot."""
        return (
            self.jobs is snapshot.jobs
            and self.loans is snapshot.loans
            and self.nodes is snapshot.nodes
            and self.pools is snapshot.pools
        )

    @property
    def has_capacities(self) -> bool:
        """Whether any node limits pods by more than its GPUs."""
        return bool(self.with_capacity)

    def copy(self) -> SnapshotIndex:
        """Return a copy that can be changed independently. It shares the results in `fit_cache`."""
        copied = object.__new__(SnapshotIndex)
        copied.__dict__.update(self.__dict__)
        own = {name: getattr(self, name).copy() for name in _MUTABLE_ATTRIBUTES}
        copied.__dict__.update(own, _job_id_sets=[own[name] for name in _JOB_SETS])
        return copied

    def derive_for(self, snapshot: Snapshot) -> SnapshotIndex:
        """Return the index of another snapshot: updated by the differences, or built if the pools differ."""
        if self.pools is not snapshot.pools:
            return SnapshotIndex.build(snapshot)
        derived = self.copy()
        derived.update_to(snapshot)
        return derived

    def update_to(self, snapshot: Snapshot) -> None:
        """Update the index to the snapshot. Records count as changed if they are other objects."""
        nodes, self.nodes = self.nodes, snapshot.nodes
        if changed_nodes := _find_changed_keys(nodes, snapshot.nodes):
            for name in changed_nodes:
                self._put_node(name, nodes.get(name))
            self.reference_gpu = choose_reference_gpu(self.owned_gpus)
            models = {gpu for (gpu, _), count in self.node_counts_by_size.items() if count}
            self.has_reference_only = models <= {self.reference_gpu}
        loans, self.loans = self.loans, snapshot.loans
        for name in _find_changed_keys(loans, snapshot.loans):
            self.put_loan(name, loans.get(name))
        jobs, self.jobs = self.jobs, snapshot.jobs
        for job_id in _find_changed_keys(jobs, snapshot.jobs):
            self.put_job(job_id, jobs.get(job_id))

    def put_job(self, job_id: str, before: Job | None) -> None:
        """Update the index for the current job of this id, if any. `before` is the previous one."""
        job = self.jobs.get(job_id)
        if job is not None and before is not None and _differs_only_in_progress(job, before):
            return
        for names in self._job_id_sets:
            names.discard(job_id)
        if job is not None:
            self._classify_job(job)
        old, new = before.allocation if before else None, job.allocation if job else None
        if old is not new:
            self._update_holders(job_id, old.held if old else NO_GPUS, new.held if new else NO_GPUS)

    def put_loan(self, node: str, before: Loan | None) -> None:
        """Update the index for the current loan of the node, if any. `before` is the previous one."""
        self.fleet_version = object()  # results in `fit_cache` for the whole fleet are outdated
        loan, host = self.loans.get(node), self.nodes.get(node)
        for each, sign in ((before, -1), (loan, 1)):
            if each is None or not each.is_live:
                continue
            gpus, state = 0 if host is None else sign * each.count_gpus(host), each.state
            _add_count(self.live_loan_counts, each.pool, sign)
            _add_count(self.live_loan_gpus, each.pool, gpus)
            if state in LENT_STATES:
                _add_count(self.lent_gpus, each.pool, gpus)
            if state in UNRECALLED_LOAN_STATES:
                _add_count(self.unrecalled_loan_counts, each.pool, sign)
                _add_count(self.unrecalled_loan_gpus, each.pool, gpus)
        _set_membership(self.offered, node, loan is not None and loan.state is LoanState.OFFERED)
        _set_membership(self.recalled, node, loan is not None and loan.state is LoanState.RECALLED)
        _set_membership(self.proposed, node, loan is not None and loan.state is LoanState.PROPOSED)
        if host is not None:
            self._count_gpus(host, before, -1)
            self._count_gpus(host, loan, 1)
        self._refresh_node(node)

    def sort_by_submission(self, job_ids: Iterable[str]) -> list[Job]:
        """Return the jobs in order of submission, then by id."""
        jobs = self.jobs
        return sorted((jobs[job_id] for job_id in job_ids), key=lambda job: (job.submitted_at_s, job.id))

    def typical_node_sizes(self) -> Mapping[str, int]:
        """Return the GPUs per node of the most common node size of each GPU model.

        Canonical shapes are packed into nodes of this size. Among equally common sizes, the largest counts.
        """
        counted = sorted((nodes, gpus, gpu) for (gpu, gpus), nodes in self.node_counts_by_size.items() if nodes)
        return {gpu: gpus for _, gpus, gpu in counted}

    def count_up_nodes(self, pool: str) -> Sequence[tuple[int, int, int]]:
        """Return (GPUs per node, GPUs that its loan takes, number of nodes) for the pool's nodes that are up."""
        return self.up_node_counts.get(pool, ())

    def capacity(self, pool: str) -> int:
        """Return the number of GPUs on the pool's nodes that are up."""
        return sum(gpus * nodes for gpus, _, nodes in self.count_up_nodes(pool))

    def _classify_job(self, job: Job) -> None:
        job_id, state, spec = job.id, job.state, job.spec
        held = job.allocation.target_gpus
        profiled = spec.has_profile
        if state is JobState.QUEUED:
            self.waiting.add(job_id)
        elif state is JobState.RUNNING:
            self.running.add(job_id)
            if job.is_resizable:
                _set_membership(self.out_of_range, job_id, not spec.min_gpus <= held <= spec.max_gpus)
                _set_membership(self.elastic, job_id, spec.is_elastic)
                _set_membership(self.above_minimum, job_id, held > spec.min_gpus)
                _set_membership(self.below_maximum, job_id, held < spec.max_gpus)
        else:
            self.unsettled.add(job_id)
        if not job.is_ended:
            limited = spec.run_time_s_max is not None
            unplaced = state in (JobState.SUBMITTED, JobState.PLANNING, JobState.SUSPENDED)
            planless = profiled and state is JobState.QUEUED
            _set_membership(self.profiled, job_id, profiled)
            _set_membership(self.time_limited, job_id, limited)
            _set_membership(self.needs_new_plan, job_id, job.needs_new_plan or not job.is_curve_current)
            _set_membership(
                self.intent_candidates, job_id, job.intent is not Intent.RUN or limited or unplaced or planless
            )
        _set_membership(self.releasing, job_id, bool(job.allocation.releasing))

    def _put_node(self, name: str, before: Node | None) -> None:
        self.fleet_version = object()
        node = self.nodes.get(name)
        for each, sign in ((before, -1), (node, 1)):
            if each is not None:
                _add_count(self.node_counts_by_size, (each.gpu, each.gpus), sign)
                if each.state is NodeState.UP:
                    self._count_up_node(each, sign)
                self._count_gpus(each, self.loans.get(name), sign)
                if self.pools[each.pool].kind is PoolKind.TRAINING:
                    _add_count(self.owned_gpus, each.gpu, sign * each.gpus)
        _set_membership(self.down, name, node is not None and node.state is NodeState.DOWN)
        _set_membership(self.cordoned, name, node is not None and node.cordoned)
        _set_membership(self.draining, name, node is not None and node.draining)
        _set_membership(self.with_incidents, name, node is not None and bool(node.incidents))
        _set_membership(self.with_capacity, name, node is not None and node.capacity is not None)
        _set_membership(self.withheld, name, node is not None and not node.lendable)
        _set_membership(self.wake_failed, name, node is not None and _has_failed_to_wake(node))
        self._refresh_node(name)

    def _count_up_node(self, node: Node, sign: int) -> None:
        counts = {(gpus, loan_gpus): nodes for gpus, loan_gpus, nodes in self.count_up_nodes(node.pool)}
        _add_count(counts, (node.gpus, node.loan_gpus), sign)
        self.up_node_counts[node.pool] = tuple(sorted((*size, nodes) for size, nodes in counts.items() if nodes))

    def _count_gpus(self, node: Node, loan: Loan | None, sign: int) -> None:
        """Add or subtract the GPUs of the node where they belong: to inference or to training."""
        _add_count(self.inference_capacity, node.pool, sign * count_inference_gpus(node, loan))
        if serves_training(node, self.pools, loan):
            _add_count(self.training_gpus, (node.gpu, _is_lent(loan)), sign * count_training_gpus(node, loan))

    def _update_holders(self, job_id: str, before: Gpus, after: Gpus) -> None:
        """Update the holders of GPUs for a job's new allocation. GPUs that are being released remain held."""
        for node in {**before, **after}:
            was, now = before.get(node, ()), after.get(node, ())
            if was == now:
                continue
            held = {i: holder for i, holder in self.holders.get(node, {}).items() if holder != job_id or i not in was}
            held.update(dict.fromkeys(now, job_id))
            if held:
                self.holders[node] = held
            else:
                self.holders.pop(node, None)
            self._refresh_node(node)

    def _refresh_node(self, name: str) -> None:
        """Update the free GPUs of a node, and whether jobs must leave it."""
        previous = self.free_by_node.pop(name, None)
        if previous is not None:
            self.free_gpu_total -= len(previous.indices)
            _add_count(self.free_gpus, (previous.gpu, previous.is_lent), -len(previous.indices))
        node, held, loan = self.nodes.get(name), self.holders.get(name), self.loans.get(name)
        _set_membership(self.serving, name, node is not None and serves_training(node, self.pools, loan))
        if node is None:
            for names in (self.must_vacate, self.held_without_loan, self.outdated_loans, self.overused_loans):
                names.discard(name)
            return
        current = loan if loan is not None and loan.state in UNRECALLED_LOAN_STATES else None
        _set_membership(self.outdated_loans, name, current is not None and current.indices != node.lendable_gpus)
        _set_membership(self.overused_loans, name, current is not None and _is_overused(node, current))
        _set_membership(self.must_vacate, name, held is not None and must_vacate(node, self.pools, loan))
        is_foreign = self.pools[node.pool].kind is PoolKind.INFERENCE and not _is_lent(loan)
        _set_membership(self.held_without_loan, name, held is not None and is_foreign)
        if not serves_training(node, self.pools, loan):
            return
        usable: Sequence[int] = range(node.gpus) if loan is None or not loan.indices else loan.indices
        free = tuple(usable) if held is None else tuple(i for i in usable if i not in held)
        # Others may use any of these GPUs. The indices only serve to count and to distinguish GPUs.
        taken = count_taken_gpus(node, loan)
        free = free[: len(free) - taken] if taken < len(free) else ()
        if free:
            self.free_by_node[name] = FreeGpus(name, node.gpu, _is_lent(loan), free)
            self.free_gpu_total += len(free)
            _add_count(self.free_gpus, (node.gpu, _is_lent(loan)), len(free))


def _differs_only_in_progress(job: Job, before: Job) -> bool:
    """Return whether only the progress differs, which the index does not cover. The usual case is a checkpoint."""
    return (
        job.state is before.state
        and job.allocation is before.allocation
        and job.spec is before.spec
        and job.intent is before.intent
        and job.freezing is before.freezing
        and job.constants is before.constants
        and job.is_resizable == before.is_resizable
    )


def serves_training(node: Node, pools: Mapping[str, Pool], loan: Loan | None) -> bool:
    """Return whether training may start ranks on this node."""
    if node.state is not NodeState.UP or node.cordoned:
        return False
    if pools[node.pool].kind is PoolKind.TRAINING:
        return True
    return loan is not None and loan.state is LoanState.ACTIVE


def count_inference_gpus(node: Node, loan: Loan | None) -> int:
    """Count the GPUs of the node that inference can use: none if the node is down, and none that are lent."""
    if node.state is NodeState.DOWN:
        return 0
    usable = node.gpus - node.unschedulable_gpus
    return usable if loan is None or not loan.is_lent else min(usable, loan.count_kept_gpus(node))


def must_vacate(node: Node, pools: Mapping[str, Pool], loan: Loan | None) -> bool:
    """Return whether training must leave this node: it is recalled, down, draining or not lent."""
    if node.state is not NodeState.UP or node.draining:
        return True
    return pools[node.pool].kind is PoolKind.INFERENCE and not (loan is not None and loan.state is LoanState.ACTIVE)


def _is_lent(loan: Loan | None) -> bool:
    return loan is not None and loan.is_lent


def _is_overused(node: Node, loan: Loan) -> bool:
    """Return whether inference uses more GPUs of a partially lent node than the loan leaves to it."""
    return loan.is_partial and node.inference_gpus > loan.count_kept_gpus(node)


def _find_changed_keys(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return keys whose record was removed or is another object.

    Removed keys come first, because their GPUs may have a new holder.
    """
    if before is after:
        return []
    changed = [key for key, record in after.items() if before.get(key) is not record]
    if len(before) + sum(key not in before for key in changed) == len(after):
        return changed
    return [*(key for key in before if key not in after), *changed]


def _has_failed_to_wake(node: Node) -> bool:
    return node.standby is not None and node.standby.phase is StandbyPhase.WAKE_FAILED


def _set_membership(names: set[str], name: str, belongs: bool) -> None:
    if belongs:
        names.add(name)
    else:
        names.discard(name)


def _add_count(counts: dict[K, int], key: K, change: int) -> None:
    if change:
        counts[key] = counts.get(key, 0) + change
