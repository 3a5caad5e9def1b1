"""Ledger: what follows from a snapshot's nodes, loans and jobs: who holds which GPU, what is free, who needs a look.

It is worked out once and then kept up to date change by change, because a tick that passes over every node and job
for each of its questions costs ten times as much as one that looks at what has changed. It adds nothing to the
snapshot's value: `Ledger.of` makes the same one from nothing, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from scheduler.domain.fleet import Node, NodeState, Pool, PoolKind
from scheduler.domain.gpus import NO_GPUS, Gpus
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.loan import STANDING_LOANS, Loan, LoanState
from scheduler.domain.observation import NodeFacts, Run
from scheduler.domain.room import Room

if TYPE_CHECKING:
    from scheduler.domain.snapshot import Snapshot

K = TypeVar("K")
Kind = tuple[str, bool]
"""GPU model, and whether the node is lent."""
Holders = dict[str, Mapping[int, str]]
"""Who holds which GPU: node -> index -> job id. GPUs that are being released count as held."""

_NODES = ("down", "cordoned", "draining", "leaving", "unlent")
_LOANS = ("offered", "recalled")
_JOBS = (
    "waiting", "running", "unsettled", "watched", "releasing", "misfits", "elastic", "flexible", "growable", "profiled",
    "limited", "refrozen",
)  # fmt: skip
_COUNTS = ("free", "serving", "sizes", "up", "standing", "away", "lent_gpus", "supply")
_OWN = (*_NODES, *_LOANS, *_JOBS, *_COUNTS, "holders", "rooms")


class Ledger:
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
        self.heard: dict[str, Run] = {}
        self.heard_nodes: tuple[Mapping[str, NodeFacts], Mapping[str, Node]] | None = None
        self.usable_gpus = 0
        self.holders: Holders = {}
        self.rooms: dict[str, Room] = {}
        self.down: set[str] = set()
        self.cordoned: set[str] = set()
        self.draining: set[str] = set()
        self.leaving: set[str] = set()
        self.unlent: set[str] = set()
        self.offered: set[str] = set()
        self.recalled: set[str] = set()
        self.waiting: set[str] = set()
        self.running: set[str] = set()
        self.unsettled: set[str] = set()
        self.watched: set[str] = set()
        self.releasing: set[str] = set()
        self.misfits: set[str] = set()
        self.elastic: set[str] = set()
        self.flexible: set[str] = set()
        self.growable: set[str] = set()
        self.profiled: set[str] = set()
        self.limited: set[str] = set()
        self.refrozen: set[str] = set()
        self.free: dict[Kind, int] = {}
        self.serving: dict[Kind, int] = {}
        self.sizes: dict[tuple[str, int], int] = {}
        self.up: dict[tuple[str, int], int] = {}
        self.standing: dict[str, int] = {}
        self.away: dict[str, int] = {}
        self.lent_gpus: dict[str, int] = {}
        self.supply: dict[str, int] = {}
        self._job_sets: list[set[str]] = [getattr(self, name) for name in _JOBS]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Ledger:
        """A ledger of its own, from nothing."""
        ledger = cls(snapshot.pools)
        ledger.follow(snapshot)
        return ledger

    def stands_for(self, snapshot: Snapshot) -> bool:
        return (
            self.jobs is snapshot.jobs
            and self.loans is snapshot.loans
            and self.nodes is snapshot.nodes
            and self.pools is snapshot.pools
        )

    def copy(self) -> Ledger:
        """The same, to be changed apart from this one."""
        twin = object.__new__(Ledger)
        twin.__dict__.update(self.__dict__)
        own = {name: getattr(self, name).copy() for name in _OWN}
        twin.__dict__.update(own, heard=self.heard.copy(), _job_sets=[own[name] for name in _JOBS])
        return twin

    def moved_to(self, snapshot: Snapshot) -> Ledger:
        """The ledger of another snapshot: from nothing where pools have changed, else by what differs."""
        if self.pools is not snapshot.pools:
            return Ledger.of(snapshot)
        twin = self.copy()
        twin.follow(snapshot)
        return twin

    def follow(self, snapshot: Snapshot) -> None:
        """Take over every record that is another object than before."""
        nodes, self.nodes = self.nodes, snapshot.nodes
        for name in _differing(nodes, snapshot.nodes):
            self._put_node(name, nodes.get(name))
        loans, self.loans = self.loans, snapshot.loans
        for name in _differing(loans, snapshot.loans):
            self.put_loan(name, loans.get(name))
        jobs, self.jobs = self.jobs, snapshot.jobs
        for job_id in _differing(jobs, snapshot.jobs):
            self.put_job(job_id, jobs.get(job_id))

    def put_job(self, job_id: str, before: Job | None) -> None:
        """Take over the job that `jobs` has now, or that it has none; `before` is the one it had."""
        job = self.jobs.get(job_id)
        self.heard.pop(job_id, None)
        if job is not None and before is not None and _stands_alike(job, before):
            return
        for names in self._job_sets:
            names.discard(job_id)
        if job is not None:
            self._list(job)
        old, new = before.allocation if before else None, job.allocation if job else None
        if old is not new:
            self._rehold(job_id, old.held if old else NO_GPUS, new.held if new else NO_GPUS)

    def put_loan(self, node: str, before: Loan | None) -> None:
        """Take over a node's loan: the node may begin or cease to serve training."""
        loan, host = self.loans.get(node), self.nodes.get(node)
        for each, sign in ((before, -1), (loan, 1)):
            if each is not None:
                _add(self.lent_gpus, each.pool, sign * host.gpus if host is not None and _lent(each) else 0)
                _add(self.standing, each.pool, sign * (each.state in STANDING_LOANS))
                _add(self.away, each.pool, sign * each.is_live)
        _keep(self.offered, node, loan is not None and loan.state is LoanState.OFFERED)
        _keep(self.recalled, node, loan is not None and loan.state is LoanState.RECALLED)
        if host is not None:
            self._count_gpus(host, before, -1)
            self._count_gpus(host, loan, 1)
        self._refresh(node)

    def ordered(self, job_ids: Iterable[str]) -> list[Job]:
        """These jobs in order of submission: the same one however the ledger came about."""
        jobs = self.jobs
        return sorted((jobs[job_id] for job_id in job_ids), key=lambda job: (job.submitted_at_s, job.id))

    def node_sizes(self) -> Mapping[str, int]:
        """GPUs of the commonest node of each GPU model: canonical shapes are packed into those. Of equals the larger
        counts."""
        counted = sorted((nodes, gpus, gpu) for (gpu, gpus), nodes in self.sizes.items() if nodes)
        return {gpu: gpus for _, gpus, gpu in counted}

    def up_nodes(self, pool: str) -> Iterator[tuple[int, int]]:
        """(GPUs of a node, how many such nodes are up) of a pool."""
        return ((gpus, nodes) for (name, gpus), nodes in self.up.items() if name == pool and nodes)

    def capacity(self, pool: str) -> int:
        """GPUs of a pool's nodes that are up."""
        return sum(gpus * nodes for gpus, nodes in self.up_nodes(pool))

    def _list(self, job: Job) -> None:
        job_id, state, spec = job.id, job.state, job.spec
        held = job.allocation.target_gpus
        profiled = spec.has_profile
        if state is JobState.QUEUED:
            self.waiting.add(job_id)
        elif state is JobState.RUNNING:
            self.running.add(job_id)
            if not spec.min_gpus <= held <= spec.max_gpus:
                self.misfits.add(job_id)
            if spec.is_elastic:
                self.elastic.add(job_id)
            if held > spec.min_gpus:
                self.flexible.add(job_id)
            if held < spec.max_gpus:
                self.growable.add(job_id)
        else:
            self.unsettled.add(job_id)
        if not job.is_ended:
            limited = spec.run_time_s_max is not None
            unplaced = state in (JobState.SUBMITTED, JobState.PLANNING, JobState.SUSPENDED)
            planless = profiled and state is JobState.QUEUED
            _keep(self.profiled, job_id, profiled)
            _keep(self.limited, job_id, limited)
            _keep(self.refrozen, job_id, job.freezing.awaits_plan)
            _keep(self.watched, job_id, job.intent is not Intent.RUN or limited or unplaced or planless)
        _keep(self.releasing, job_id, bool(job.allocation.releasing))

    def _put_node(self, name: str, before: Node | None) -> None:
        node = self.nodes.get(name)
        for each, sign in ((before, -1), (node, 1)):
            if each is not None:
                _add(self.sizes, (each.gpu, each.gpus), sign)
                _add(self.up, (each.pool, each.gpus), sign * (each.state is NodeState.UP))
                self._count_gpus(each, self.loans.get(name), sign)
        _keep(self.down, name, node is not None and node.state is NodeState.DOWN)
        _keep(self.cordoned, name, node is not None and node.cordoned)
        _keep(self.draining, name, node is not None and node.draining)
        self._refresh(name)

    def _count_gpus(self, node: Node, loan: Loan | None, sign: int) -> None:
        """Whom the node serves: inference, training, or while it is down nobody."""
        _add(self.supply, node.pool, sign * left_to_inference(node, loan))
        if serves_training(node, self.pools, loan):
            _add(self.serving, (node.gpu, _lent(loan)), sign * max(0, node.gpus - node.other_gpus))

    def _rehold(self, job_id: str, before: Gpus, after: Gpus) -> None:
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
            self._refresh(node)

    def _refresh(self, name: str) -> None:
        """Bring what is free on a node, and whether somebody has to leave it, up to date."""
        room = self.rooms.pop(name, None)
        if room is not None:
            self.usable_gpus -= len(room.free)
            _add(self.free, (room.gpu, room.lent), -len(room.free))
        node, held, loan = self.nodes.get(name), self.holders.get(name), self.loans.get(name)
        if node is None:
            self.leaving.discard(name)
            self.unlent.discard(name)
            return
        _keep(self.leaving, name, held is not None and must_be_left(node, self.pools, loan))
        foreign = self.pools[node.pool].kind is PoolKind.INFERENCE and not _lent(loan)
        _keep(self.unlent, name, held is not None and foreign)
        if not serves_training(node, self.pools, loan):
            return
        free = tuple(range(node.gpus)) if held is None else tuple(i for i in range(node.gpus) if i not in held)
        # Which of them others use is not known and does not matter: an index only tells one GPU from the next.
        free = free[: len(free) - node.other_gpus] if node.other_gpus < len(free) else ()
        if free:
            self.rooms[name] = Room(name, node.gpu, _lent(loan), free)
            self.usable_gpus += len(free)
            _add(self.free, (node.gpu, _lent(loan)), len(free))


def _stands_alike(job: Job, before: Job) -> bool:
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


def left_to_inference(node: Node, loan: Loan | None) -> int:
    """GPUs that inference has on a node of its own: none where it is down or lent; on a cordoned one those it uses."""
    return 0 if node.state is NodeState.DOWN or _lent(loan) else node.gpus - node.closed_gpus


def must_be_left(node: Node, pools: Mapping[str, Pool], loan: Loan | None) -> bool:
    """Training has to get off this node: recalled, down, draining, or not lent (any more)."""
    if node.state is not NodeState.UP or node.draining:
        return True
    return pools[node.pool].kind is PoolKind.INFERENCE and not (loan is not None and loan.state is LoanState.ACTIVE)


def _lent(loan: Loan | None) -> bool:
    return loan is not None and loan.state in (LoanState.ACTIVE, LoanState.RECALLED)


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Keys whose record is another object, or gone. What was taken out comes first: its GPUs may be held anew."""
    if before is after:
        return []
    changed = [key for key, record in after.items() if before.get(key) is not record]
    if len(before) + sum(key not in before for key in changed) == len(after):
        return changed
    return [*(key for key in before if key not in after), *changed]


def _keep(names: set[str], name: str, belongs: bool) -> None:
    if belongs:
        names.add(name)
    else:
        names.discard(name)


def _add(counts: dict[K, int], key: K, change: int) -> None:
    if change:
        counts[key] = counts.get(key, 0) + change
