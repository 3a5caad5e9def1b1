"""Ledger: what follows from a snapshot's nodes, loans and jobs: who holds which GPU, what is free, who needs a look.

It is worked out once and then kept up to date change by change, because a tick that passes over every node and job
for each of its questions costs ten times as much as one that looks at what has changed. It adds nothing to the
snapshot's value: `Ledger.of` makes the same one from nothing, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from scheduler.domain.fleet import UNRECALLED_LOAN_STATES, Loan, LoanState, Node, NodeState, Pool, PoolKind
from scheduler.domain.gpu_sets import NO_GPUS, FreeGpus, Gpus
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import NodeFacts, Run

if TYPE_CHECKING:
    from scheduler.domain.snapshot import Snapshot


K = TypeVar("K")
GpuKind = tuple[str, bool]
"""GPU model, and whether the node is lent."""
GpuHolders = dict[str, Mapping[int, str]]
"""Who holds which GPU: node -> index -> job id. GPUs that are being released count as held."""

_NODE_SETS = ("down", "cordoned", "draining", "must_vacate", "held_without_loan")
_LOAN_SETS = ("offered", "recalled")
_JOB_SETS = (
    "waiting", "running", "unsettled", "intent_candidates", "releasing", "out_of_range", "elastic", "above_minimum",
    "below_maximum", "profiled", "time_limited", "needs_frozen_replan",
)  # fmt: skip
_COUNTERS = (
    "free_gpus", "training_gpus", "node_counts_by_size", "up_node_counts", "unrecalled_loan_counts",
    "live_loan_counts", "lent_gpus", "inference_capacity",
)  # fmt: skip
_MUTABLE_ATTRIBUTES = (*_NODE_SETS, *_LOAN_SETS, *_JOB_SETS, *_COUNTERS, "holders", "free_by_node")


class SnapshotIndex:
    """Sets of names, and counts of GPUs by kind. Whoever made it may change it by `put_*`; others only read.

    Nodes: `down`; `cordoned`; `draining`; `leaving`, held and to be left; `unlent`, held without being training's.
    Loans: `offered`, `recalled`; by pool how many are `standing` (offered or active) or `away` (not home yet), and the
    GPUs of those that training may use or still uses (`lent_gpus`).
    Inference: by pool the GPUs that are left to it (`supply`; of pools of training it says nothing).
    Jobs: `waiting` (queued), `running`, `unsettled` (any other state), `watched` (their owners' stage has to look),
    `releasing`, `misfits` (run outside their range), `elastic` (run), `flexible` (run above their minimum), `growable`
    (run below their maximum), `profiled` (have a model), `limited` (have a longest run time), `refrozen` (layers froze
    that their plans do not count on).
    Observed: `heard`, the run of each running job that lies where the job is to lie and told nothing new when it was
    last mirrored: the same run of the same record tells nothing new again. `heard_nodes`: likewise the nodes' facts.
    GPUs: `free` and `serving` by kind. Nodes: `sizes` counts them by (GPU model, GPUs), `up` by (pool, GPUs) those that
    are up.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.pools = pools
        self.nodes: Mapping[str, Node] = {}
        self.loans: Mapping[str, Loan] = {}
        self.jobs: Mapping[str, Job] = {}
        self.observed_runs: dict[str, Run] = {}
        self.observed_nodes: tuple[Mapping[str, NodeFacts], Mapping[str, Node]] | None = None
        self.free_gpu_total = 0
        self.holders: GpuHolders = {}
        self.free_by_node: dict[str, FreeGpus] = {}
        self.down: set[str] = set()
        self.cordoned: set[str] = set()
        self.draining: set[str] = set()
        self.must_vacate: set[str] = set()
        self.held_without_loan: set[str] = set()
        self.offered: set[str] = set()
        self.recalled: set[str] = set()
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
        self.needs_frozen_replan: set[str] = set()
        self.free_gpus: dict[GpuKind, int] = {}
        self.training_gpus: dict[GpuKind, int] = {}
        self.node_counts_by_size: dict[tuple[str, int], int] = {}
        self.up_node_counts: dict[tuple[str, int], int] = {}
        self.unrecalled_loan_counts: dict[str, int] = {}
        self.live_loan_counts: dict[str, int] = {}
        self.lent_gpus: dict[str, int] = {}
        self.inference_capacity: dict[str, int] = {}
        self._job_id_sets: list[set[str]] = [getattr(self, name) for name in _JOB_SETS]

    @classmethod
    def build(cls, snapshot: Snapshot) -> SnapshotIndex:
        """A ledger of its own, from nothing."""
        ledger = cls(snapshot.pools)
        ledger.update_to(snapshot)
        return ledger

    def matches(self, snapshot: Snapshot) -> bool:
        return (
            self.jobs is snapshot.jobs
            and self.loans is snapshot.loans
            and self.nodes is snapshot.nodes
            and self.pools is snapshot.pools
        )

    def copy(self) -> SnapshotIndex:
        """The same, to be changed apart from this one."""
        twin = object.__new__(SnapshotIndex)
        twin.__dict__.update(self.__dict__)
        own = {name: getattr(self, name).copy() for name in _MUTABLE_ATTRIBUTES}
        twin.__dict__.update(own, observed_runs=self.observed_runs.copy(), _job_id_sets=[own[name] for name in _JOB_SETS])
        return twin

    def derive_for(self, snapshot: Snapshot) -> SnapshotIndex:
        """The ledger of another snapshot: from nothing where pools have changed, else by what differs."""
        if self.pools is not snapshot.pools:
            return SnapshotIndex.build(snapshot)
        twin = self.copy()
        twin.update_to(snapshot)
        return twin

    def update_to(self, snapshot: Snapshot) -> None:
        """Take over every record that is another object than before."""
        nodes, self.nodes = self.nodes, snapshot.nodes
        for name in _changed_keys(nodes, snapshot.nodes):
            self._put_node(name, nodes.get(name))
        loans, self.loans = self.loans, snapshot.loans
        for name in _changed_keys(loans, snapshot.loans):
            self.put_loan(name, loans.get(name))
        jobs, self.jobs = self.jobs, snapshot.jobs
        for job_id in _changed_keys(jobs, snapshot.jobs):
            self.put_job(job_id, jobs.get(job_id))

    def put_job(self, job_id: str, before: Job | None) -> None:
        """Take over the job that `jobs` has now, or that it has none; `before` is the one it had."""
        job = self.jobs.get(job_id)
        self.observed_runs.pop(job_id, None)
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
        """Take over a node's loan: the node may begin or cease to serve training."""
        loan, host = self.loans.get(node), self.nodes.get(node)
        for each, sign in ((before, -1), (loan, 1)):
            if each is not None:
                _add_count(self.lent_gpus, each.pool, sign * host.gpus if host is not None and _is_lent(each) else 0)
                _add_count(self.unrecalled_loan_counts, each.pool, sign * (each.state in UNRECALLED_LOAN_STATES))
                _add_count(self.live_loan_counts, each.pool, sign * each.is_live)
        _set_membership(self.offered, node, loan is not None and loan.state is LoanState.OFFERED)
        _set_membership(self.recalled, node, loan is not None and loan.state is LoanState.RECALLED)
        if host is not None:
            self._count_gpus(host, before, -1)
            self._count_gpus(host, loan, 1)
        self._refresh_node(node)

    def sort_by_submission(self, job_ids: Iterable[str]) -> list[Job]:
        """These jobs in order of submission: the same one however the ledger came about."""
        jobs = self.jobs
        return sorted((jobs[job_id] for job_id in job_ids), key=lambda job: (job.submitted_at_s, job.id))

    def typical_node_sizes(self) -> Mapping[str, int]:
        """GPUs of the commonest node of each GPU model: canonical shapes are packed into those. Of equals the larger
        counts."""
        counted = sorted((nodes, gpus, gpu) for (gpu, gpus), nodes in self.node_counts_by_size.items() if nodes)
        return {gpu: gpus for _, gpus, gpu in counted}

    def count_up_nodes_by_size(self, pool: str) -> Iterator[tuple[int, int]]:
        """(GPUs of a node, how many such nodes are up) of a pool."""
        return ((gpus, nodes) for (name, gpus), nodes in self.up_node_counts.items() if name == pool and nodes)

    def capacity(self, pool: str) -> int:
        """GPUs of a pool's nodes that are up."""
        return sum(gpus * nodes for gpus, nodes in self.count_up_nodes_by_size(pool))

    def _classify_job(self, job: Job) -> None:
        job_id, state, spec = job.id, job.state, job.spec
        held = job.allocation.target_gpus
        profiled = spec.has_profile
        if state is JobState.QUEUED:
            self.waiting.add(job_id)
        elif state is JobState.RUNNING:
            self.running.add(job_id)
            if not spec.min_gpus <= held <= spec.max_gpus:
                self.out_of_range.add(job_id)
            if spec.is_elastic:
                self.elastic.add(job_id)
            if held > spec.min_gpus:
                self.above_minimum.add(job_id)
            if held < spec.max_gpus:
                self.below_maximum.add(job_id)
        else:
            self.unsettled.add(job_id)
        if not job.is_ended:
            limited = spec.run_time_s_max is not None
            unplaced = state in (JobState.SUBMITTED, JobState.PLANNING, JobState.SUSPENDED)
            planless = profiled and state is JobState.QUEUED
            _set_membership(self.profiled, job_id, profiled)
            _set_membership(self.time_limited, job_id, limited)
            _set_membership(self.needs_frozen_replan, job_id, job.freezing.needs_new_plan)
            _set_membership(
                self.intent_candidates, job_id, job.intent is not Intent.RUN or limited or unplaced or planless
            )
        _set_membership(self.releasing, job_id, bool(job.allocation.releasing))

    def _put_node(self, name: str, before: Node | None) -> None:
        node = self.nodes.get(name)
        for each, sign in ((before, -1), (node, 1)):
            if each is not None:
                _add_count(self.node_counts_by_size, (each.gpu, each.gpus), sign)
                _add_count(self.up_node_counts, (each.pool, each.gpus), sign * (each.state is NodeState.UP))
                self._count_gpus(each, self.loans.get(name), sign)
        _set_membership(self.down, name, node is not None and node.state is NodeState.DOWN)
        _set_membership(self.cordoned, name, node is not None and node.cordoned)
        _set_membership(self.draining, name, node is not None and node.draining)
        self._refresh_node(name)

    def _count_gpus(self, node: Node, loan: Loan | None, sign: int) -> None:
        """Whom the node serves: inference, training, or while it is down nobody."""
        _add_count(self.inference_capacity, node.pool, sign * count_inference_gpus(node, loan))
        if serves_training(node, self.pools, loan):
            _add_count(self.training_gpus, (node.gpu, _is_lent(loan)), sign * max(0, node.gpus - node.other_gpus))

    def _update_holders(self, job_id: str, before: Gpus, after: Gpus) -> None:
        """What the job holds has changed on some nodes. GPUs that it is only releasing it still holds."""
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
        """Bring what is free on a node, and whether somebody has to leave it, up to date."""
        room = self.free_by_node.pop(name, None)
        if room is not None:
            self.free_gpu_total -= len(room.indices)
            _add_count(self.free_gpus, (room.gpu, room.is_lent), -len(room.indices))
        node, held, loan = self.nodes.get(name), self.holders.get(name), self.loans.get(name)
        if node is None:
            self.must_vacate.discard(name)
            self.held_without_loan.discard(name)
            return
        _set_membership(self.must_vacate, name, held is not None and must_vacate(node, self.pools, loan))
        foreign = self.pools[node.pool].kind is PoolKind.INFERENCE and not _is_lent(loan)
        _set_membership(self.held_without_loan, name, held is not None and foreign)
        if not serves_training(node, self.pools, loan):
            return
        free = tuple(range(node.gpus)) if held is None else tuple(i for i in range(node.gpus) if i not in held)
        # Which of them others use is not known and does not matter: an index only tells one GPU from the next.
        free = free[: len(free) - node.other_gpus] if node.other_gpus < len(free) else ()
        if free:
            self.free_by_node[name] = FreeGpus(name, node.gpu, _is_lent(loan), free)
            self.free_gpu_total += len(free)
            _add_count(self.free_gpus, (node.gpu, _is_lent(loan)), len(free))


def _differs_only_in_progress(job: Job, before: Job) -> bool:
    """Only the progress differs: nothing that a ledger tells of. The usual case, a checkpoint."""
    return (
        job.state is before.state
        and job.allocation is before.allocation
        and job.spec is before.spec
        and job.intent is before.intent
        and job.freezing is before.freezing
    )


def serves_training(node: Node, pools: Mapping[str, Pool], loan: Loan | None) -> bool:
    """Training may put something new on this node now."""
    if node.state is not NodeState.UP or node.cordoned:
        return False
    if pools[node.pool].kind is PoolKind.TRAINING:
        return True
    return loan is not None and loan.state is LoanState.ACTIVE


def count_inference_gpus(node: Node, loan: Loan | None) -> int:
    """GPUs that inference has on a node of its own: none where it is down or lent; on a cordoned one those it uses."""
    return 0 if node.state is NodeState.DOWN or _is_lent(loan) else node.gpus - node.unschedulable_gpus


def must_vacate(node: Node, pools: Mapping[str, Pool], loan: Loan | None) -> bool:
    """Training has to get off this node: recalled, down, draining, or not lent (any more)."""
    if node.state is not NodeState.UP or node.draining:
        return True
    return pools[node.pool].kind is PoolKind.INFERENCE and not (loan is not None and loan.state is LoanState.ACTIVE)


def _is_lent(loan: Loan | None) -> bool:
    return loan is not None and loan.state in (LoanState.ACTIVE, LoanState.RECALLED)


def _changed_keys(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Keys whose record is another object, or gone. What was taken out comes first: its GPUs may be held anew."""
    if before is after:
        return []
    changed = [key for key, record in after.items() if before.get(key) is not record]
    if len(before) + sum(key not in before for key in changed) == len(after):
        return changed
    return [*(key for key in before if key not in after), *changed]


def _set_membership(names: set[str], name: str, belongs: bool) -> None:
    if belongs:
        names.add(name)
    else:
        names.discard(name)


def _add_count(counts: dict[K, int], key: K, change: int) -> None:
    if change:
        counts[key] = counts.get(key, 0) + change
