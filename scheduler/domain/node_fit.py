"""Feasible nodes of a job: by requests, labels, taints, volumes and refusals, and the GPUs that it can use there.

Kubelet admits a pod by the same rules. A node without a known capacity accepts every job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.domain.fleet import Loan, Node, count_training_gpus
from scheduler.domain.gpu_sets import FreeGpus
from scheduler.domain.host_ports import find_amount, format_host_port
from scheduler.domain.job import Job
from scheduler.domain.node_selection import format_terms, matches_terms
from scheduler.domain.placement_record import VolumeFacts
from scheduler.domain.pod_requirements import UNKNOWN_CAPACITY, PodRequirements
from scheduler.domain.quantities import format_resource

if TYPE_CHECKING:
    from scheduler.domain.snapshot_index import SnapshotIndex

GpuKind = tuple[str, bool]
CACHED_RESULTS_MAX = 2_000_000
"""Largest number of cached results, one for each candidate and node."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """All that decides on which nodes a job's pods fit. Jobs that are alike share one."""

    requirements: PodRequirements
    volumes: VolumeFacts | None
    avoided: tuple[str, ...]
    awaits_review: bool = False

    @property
    def needs_one_node(self) -> bool:
        return self.volumes is not None and self.volumes.needs_one_node


class CandidateFit:
    """Results for one candidate, each valid for the objects that it was computed from.

    By node: GPUs and reasons without other jobs, and usable free GPUs. By fleet version: totals, and explanations by
    GPU model and whether lent nodes count.
    """

    def __init__(self) -> None:
        self.alone: dict[str, tuple[Node, int]] = {}
        self.reasons: dict[str, tuple[Node, str]] = {}
        self.rooms: dict[str, tuple[FreeGpus, FreeGpus | None]] = {}
        self.totals: tuple[object, Mapping[GpuKind, int] | None] = (None, None)
        self.texts: dict[tuple[str, bool], tuple[object, str]] = {}


class FitCache:
    """Results that outlive a tick, shared by an index and its copies."""

    def __init__(self) -> None:
        self.candidates: dict[Candidate, CandidateFit] = {}
        self.unused_resources: dict[str, tuple[Node, Mapping[str, int]]] = {}

    def find(self, candidate: Candidate, nodes: int) -> CandidateFit:
        """Return the results for the candidate. The oldest ones make room for new ones."""
        found = self.candidates.get(candidate)
        if found is None:
            while len(self.candidates) * nodes >= CACHED_RESULTS_MAX:
                del self.candidates[next(iter(self.candidates))]
            found = self.candidates[candidate] = CandidateFit()
        return found


class NodeFit:
    """Feasibility in the current state of an index. The index may change between calls."""

    def __init__(self, index: SnapshotIndex, now_s: float) -> None:
        self._index = index
        self._now_s = now_s
        self._candidates: dict[str, tuple[Job, Candidate, CandidateFit]] = {}
        self._free: dict[str, tuple[FreeGpus | None, Mapping[str, int]]] = {}

    def find_group(self, job: Job) -> CandidateFit | None:
        """Return the results that jobs with equal pods share. None if no node limits pods by more than its GPUs."""
        return self._find_candidate(job)[1] if self._index.has_capacities else None

    def limit(self, job: Job, rooms: Collection[FreeGpus]) -> Collection[FreeGpus]:
        """Return the part of the free GPUs that the job can use, node by node.

        A job that needs one node gets those of its node, or of one node of each model.
        """
        if not self._index.has_capacities:
            return rooms
        limited = self._limit_rooms(job, rooms)
        return _choose_one_node(job, limited) if self.needs_one_node(job) else limited

    def needs_one_node(self, job: Job) -> bool:
        """Return whether all pods of the job must be on one node, because of its volumes."""
        return self._index.has_capacities and self._find_candidate(job)[0].needs_one_node

    def _limit_rooms(self, job: Job, rooms: Collection[FreeGpus]) -> Collection[FreeGpus]:
        candidate, found = self._find_candidate(job)
        held, known, result = job.allocation.held, found.rooms, []
        for room in rooms:
            before = known.get(room.node)
            if before is not None and before[0] is room and room.node not in held:
                limited = before[1]
            else:
                limited = self._limit_room(job, candidate, room)
                if room.node not in held:
                    known[room.node] = (room, limited)
            if limited is not None:
                result.append(limited)
        return result

    def count_free(self, job: Job) -> Mapping[GpuKind, int] | None:
        """Count the free GPUs that the job can use, by kind. None if that is all of them."""
        if not self._index.has_capacities:
            return None
        rooms = self._limit_rooms(job, self._index.free_by_node.values())
        counts = (((room.gpu, room.is_lent), len(room.indices)) for room in rooms)
        found = _count_by_kind(counts, on_one_node=self.needs_one_node(job))
        free = {kind: gpus for kind, gpus in self._index.free_gpus.items() if gpus}
        return None if dict(found) == free else found

    def count_alone(self, job: Job) -> Mapping[GpuKind, int] | None:
        """Count the GPUs that the job could use if no other job held any, by kind. None if that is all of them."""
        if not self._index.has_capacities:
            return None
        candidate, cached = self._find_candidate(job)
        version, totals = cached.totals
        if version is not self._index.fleet_version:
            counts = (((node.gpu, self._is_lent(node)), gpus) for node, gpus in self._count_alone_by_node(job))
            found = _count_by_kind(counts, on_one_node=candidate.needs_one_node)
            serving = {kind: gpus for kind, gpus in self._index.training_gpus.items() if gpus}
            totals = None if dict(+found) == serving else found
            cached.totals = (self._index.fleet_version, totals)
        return totals

    def find_feasible_nodes(self, job: Job) -> frozenset[str] | None:
        """Return the nodes on which the job could use all GPUs if no other job held any. None if these are all."""
        if not self._index.has_capacities:
            return None
        names, is_limited = set[str](), False
        for node, gpus in self._count_alone_by_node(job):
            if gpus >= count_training_gpus(node, self._index.loans.get(node.name)):
                names.add(node.name)
            else:
                is_limited = True
        return frozenset(names) if is_limited else None

    def find_claimable_nodes(self, job: Job, donors: Iterable[Job]) -> frozenset[str] | None:
        """Return the nodes on which the job could use each GPU that a donor gave up. None if nothing is limited."""
        if not self._index.has_capacities:
            return None
        candidate, _ = self._find_candidate(job)
        if candidate.needs_one_node:
            return frozenset()  # donors may give up GPUs of several nodes
        claimable: dict[str, bool] = {}
        for donor in donors:
            requirements = donor.pod_requirements
            for name in donor.allocation.target:
                node = self._index.nodes.get(name)
                if node is None or node.capacity is None:
                    continue
                free = dict(self._free_resources(node))
                for resource, amount in requirements.per_gpu:
                    free[resource] = free.get(resource, 0) + amount
                fits = self._matches(candidate, node) and candidate.requirements.count_fitting_gpus(free, 1) > 0
                claimable[name] = fits and claimable.get(name, True)
        return None if all(claimable.values()) else frozenset(name for name, fits in claimable.items() if fits)

    def find_misfit(self, job: Job, node: Node, gpus: int) -> str:
        """Return why a pod of the job with this many GPUs does not fit on the node now, or an empty string."""
        if node.capacity is None:
            return ""
        candidate, _ = self._find_candidate(job)
        if not self._matches(candidate, node):
            return f"node {node.name} does not match the job's selectors, tolerations, volumes or refusals"
        free = self._free_resources(node, without=job.id)
        for name, amount in sorted(candidate.requirements.compute_requests(gpus).items()):
            if amount > find_amount(free, name):
                if port := format_host_port(name):
                    return f"{port} of node {node.name} is in use"
                have = format_resource(name, max(0, free.get(name, 0)))
                return f"node {node.name} has {have} left; the pod needs {format_resource(name, amount)}"
        return ""

    def explain_infeasibility(self, job: Job) -> str:
        """Return why the job fits on too few of the nodes of its GPU model that it could use."""
        candidate, found = self._find_candidate(job)
        key = (job.spec.gpu, job.accepts_lent_nodes)
        version, text = found.texts.get(key, (None, ""))
        if version is not self._index.fleet_version:
            nodes = [
                node for node in map(self._index.nodes.__getitem__, self._index.serving) if self._accepts(job, node)
            ]
            text = self._explain(candidate, found, nodes)
            found.texts[key] = (self._index.fleet_version, text)
        return text

    def _accepts(self, job: Job, node: Node) -> bool:
        return job.spec.gpu in ("", node.gpu) and (job.accepts_lent_nodes or not self._is_lent(node))

    def _explain(self, candidate: Candidate, found: CandidateFit, nodes: Collection[Node]) -> str:
        reasons: Counter[str] = Counter()
        for node in nodes:
            before = found.reasons.get(node.name)
            if before is None or before[0] is not node:
                reason = "" if node.capacity is None else self._classify(candidate, node)
                before = found.reasons[node.name] = (node, reason)
            if before[1]:
                reasons[before[1]] += 1
        ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        return "; ".join(
            f"{self._describe(candidate, reason, nodes)} ({count} of {len(nodes)} nodes)" for reason, count in ordered
        )

    def _classify(self, candidate: Candidate, node: Node) -> str:
        """Return the first reason why the node is infeasible or limited: a word, or the name of a resource."""
        capacity, requirements = node.capacity, candidate.requirements
        assert capacity is not None, "only nodes of known capacity are classified"
        if capacity is UNKNOWN_CAPACITY or capacity == UNKNOWN_CAPACITY:
            return "unobserved"
        labels = dict(capacity.labels)
        if node.name in candidate.avoided:
            return "avoided"
        if not requirements.matches_labels(node.name, labels):
            return "labels"
        if taints := requirements.find_untolerated(capacity.taints):
            return f"taint {taints[0]}"
        if candidate.volumes and not all(matches_terms(each, node.name, labels) for each in candidate.volumes.terms):
            return "volumes"
        free = self._unused_resources(node)
        needed = requirements.compute_requests(1)
        return next((name for name in sorted(needed) if needed[name] > find_amount(free, name)), "")

    def _describe(self, candidate: Candidate, reason: str, nodes: Iterable[Node]) -> str:
        requirements = candidate.requirements
        if reason == "unobserved":
            return "the resources of nodes are not known yet"
        if reason == "avoided":
            return "nodes refused its pods and are avoided for now"
        if reason == "labels":
            selector = ", ".join(f"{key}={value}" for key, value in requirements.selector)
            parts = {"nodeSelector": selector, "node affinity": format_terms(requirements.terms)}
            wanted = " and ".join(f"{field} {text}" for field, text in parts.items() if text)
            return f"nodes do not match {wanted}"
        if reason == "volumes":
            return "nodes cannot mount its volumes, because of the volumes' node affinity"
        if reason.startswith("taint "):
            return f"it does not tolerate {reason}"
        if port := format_host_port(reason):
            return f"pods that are not Ebbtide's use {port}"
        known = [node for node in nodes if node.capacity is not None]
        best = max(known, key=lambda node: (self._unused_resources(node).get(reason, 0), node.name))
        have = max(0, self._unused_resources(best).get(reason, 0))
        need = requirements.compute_requests(1)[reason]
        per = "on each node, even for one GPU" if dict(requirements.per_gpu).get(reason) else "per node"
        return (
            f"needs {format_resource(reason, need)} {per}; the largest node of pool {best.pool} has "
            f"{format_resource(reason, have)}"
        )

    def _find_candidate(self, job: Job) -> tuple[Candidate, CandidateFit]:
        known, awaits_review = self._candidates.get(job.id), job.awaits_review
        if known is not None and _is_alike(known[0], job) and known[1].awaits_review is awaits_review:
            return known[1], known[2]
        requirements, placement = job.pod_requirements, job.placement
        avoided = placement.find_avoided(self._now_s) if placement.avoided else ()
        volumes = placement.volumes if requirements.claims else NO_VOLUMES
        candidate = Candidate(requirements, volumes, avoided, awaits_review)
        found = self._index.fit_cache.find(candidate, len(self._index.nodes))
        self._candidates[job.id] = (job, candidate, found)
        return candidate, found

    def _count_alone_by_node(self, job: Job) -> Iterator[tuple[Node, int]]:
        """Yield each node that serves training, with the GPUs that the job could use if it were alone."""
        candidate, found = self._find_candidate(job)
        known, loans = found.alone, self._index.loans
        for name in self._index.serving:
            node, loan = self._index.nodes[name], loans.get(name)
            before = known.get(name)
            if before is None or before[0] is not node:
                before = known[name] = (node, self._count_alone(candidate, node))
            if loan is not None and loan.is_partial:
                yield node, min(before[1], count_training_gpus(node, loan))
            else:
                yield before

    def _count_alone(self, candidate: Candidate, node: Node) -> int:
        """Return the GPUs of the whole node that pods of the candidate could use if they were alone."""
        gpus = max(0, node.gpus - node.other_gpus)
        if node.capacity is None:
            return gpus
        fits = self._matches(candidate, node)
        return candidate.requirements.count_fitting_gpus(self._unused_resources(node), gpus) if fits else 0

    def _limit_room(self, job: Job, candidate: Candidate, room: FreeGpus) -> FreeGpus | None:
        node = self._index.nodes[room.node]
        if node.capacity is None:
            return room
        if not self._matches(candidate, node):
            return None
        own, free_gpus = len(job.allocation.target.get(room.node, ())), len(room.indices)
        free = self._free_resources(node, without=job.id if own else "")
        usable = candidate.requirements.count_fitting_gpus(free, own + free_gpus) - own
        if usable >= free_gpus:
            return room
        return FreeGpus(room.node, room.gpu, room.is_lent, room.indices[:usable]) if usable > 0 else None

    def _matches(self, candidate: Candidate, node: Node) -> bool:
        """Return whether nothing but resources keeps the pods off the node."""
        capacity, volumes = node.capacity, candidate.volumes
        assert capacity is not None, "nodes without a known capacity accept every job"
        if node.name in candidate.avoided or volumes is None or volumes.error or candidate.awaits_review:
            return False
        requirements = candidate.requirements
        if capacity.taints and requirements.find_untolerated(capacity.taints):
            return False
        if not requirements.selector and not requirements.terms and not volumes.terms:
            return True
        labels = dict(capacity.labels)
        return requirements.matches_labels(node.name, labels) and all(
            matches_terms(each, node.name, labels) for each in volumes.terms
        )

    def _unused_resources(self, node: Node) -> Mapping[str, int]:
        """Return what the node would have left if no job ran on it."""
        known = self._index.fit_cache.unused_resources.get(node.name)
        if known is not None and known[0] is node:
            return known[1]
        capacity = node.capacity
        assert capacity is not None, "only nodes of known capacity have resources"
        unused = dict(capacity.allocatable)
        for name, amount in capacity.requested:
            unused[name] = find_amount(unused, name) - amount
        self._index.fit_cache.unused_resources[node.name] = (node, unused)
        return unused

    def _free_resources(self, node: Node, *, without: str = "") -> Mapping[str, int]:
        """Return the resources that no pod requests, or no pod of jobs other than `without`."""
        index, known = self._index, self._free.get(node.name)
        room = index.free_by_node.get(node.name)
        if known is not None and known[0] is room and room is not None and not without:
            return known[1]
        free = dict(self._unused_resources(node))
        for job_id, gpus in Counter(index.holders.get(node.name, {}).values()).items():
            if job_id != without and (holder := index.jobs.get(job_id)) is not None:
                for name, amount in holder.pod_requirements.compute_requests(gpus).items():
                    free[name] = find_amount(free, name) - amount
        if not without:
            self._free[node.name] = (room, free)
        return free

    def _is_lent(self, node: Node) -> bool:
        loan: Loan | None = self._index.loans.get(node.name)
        return loan is not None and loan.is_lent


def _count_by_kind(counts: Iterable[tuple[GpuKind, int]], *, on_one_node: bool) -> Counter[GpuKind]:
    """Add up the GPUs of nodes by kind, or find those of the largest node."""
    found: Counter[GpuKind] = Counter()
    for kind, gpus in counts:
        found[kind] = max(found[kind], gpus) if on_one_node else found[kind] + gpus
    return found


def _choose_one_node(job: Job, rooms: Iterable[FreeGpus]) -> list[FreeGpus]:
    """Return the free GPUs of the job's node, or of one node of each model: the tightest one that has enough.

    A volume must leave its node before another node can mount it, so the job never moves while it runs.
    """
    if held := job.allocation.held:
        return [room for room in rooms if len(held) == 1 and room.node in held]
    best: dict[str, FreeGpus] = {}
    for room in rooms:
        if job.accepts_lent_nodes or not room.is_lent:
            best[room.gpu] = min(best.get(room.gpu, room), room, key=lambda each: _one_node_key(job, each))
    return list(best.values())


def _one_node_key(job: Job, room: FreeGpus) -> tuple[int, int, str]:
    gpus = len(room.indices)
    return -min(gpus, job.spec.max_gpus), gpus, room.node


def _is_alike(known: Job, job: Job) -> bool:
    return known.placement is job.placement and known.spec is job.spec


NO_VOLUMES = VolumeFacts()
