"""Lending and returning nodes at the API server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from scheduler.domain.loan import Loan
from scheduler.k8s.client import Cluster, Eviction
from scheduler.k8s.cluster_mirrors import ClusterMirrors
from scheduler.k8s.effects import Effect
from scheduler.k8s.kinds import EPOCH_ANNOTATION, LOAN_LABEL, LOANED_TAINT, LOANED_TAINT_KEY, NODE
from scheduler.k8s.lent_nodes import EvictPod, LendingStep, TaintNode, Unplaceable, UntaintNode
from scheduler.k8s.node_view import NodeView
from scheduler.k8s.pod_facts import PodFacts
from scheduler.store.protocol import FencedError

logger = logging.getLogger(__name__)


class NodeLending:
    """Lending steps as calls. `mirrors` take in what the API server answers, ahead of the watch."""

    def __init__(self, cluster: Cluster, mirrors: ClusterMirrors, *, epoch: Callable[[], int]) -> None:
        self._cluster = cluster
        self._mirrors = mirrors
        self._epoch = epoch

    def steps(self, wanted: Iterable[LendingStep]) -> Iterator[Effect]:
        for step in wanted:
            match step:
                case TaintNode(node=node, loan=loan):
                    yield Effect(f"lend node {node.name}", partial(self._taint, node, loan))
                case UntaintNode(node=node):
                    yield Effect(f"give node {node.name} back", partial(self._untaint, node))
                case EvictPod(pod=pod):
                    yield Effect(f"evict pod {pod.namespace}/{pod.name}", partial(self._evict, pod))
                case Unplaceable(node=node, gpus=gpus):
                    logger.info("node %s is not lent yet: its pods, of %d GPUs, fit nowhere else", node, gpus)

    def _taint(self, node: NodeView, loan: Loan) -> None:
        others = [dict(taint) for taint in node.taints if taint.get("key") != LOANED_TAINT_KEY]
        self._change(node, [*others, LOANED_TAINT], loan=loan.id)

    def _untaint(self, node: NodeView) -> None:
        self._change(node, [dict(taint) for taint in node.taints if taint.get("key") != LOANED_TAINT_KEY])

    def _change(self, node: NodeView, taints: list[Any], *, loan: str | None = None) -> None:
        """A list of taints is replaced as a whole: the version that it was read at keeps those of others."""
        if node.epoch > self._epoch():
            raise FencedError(f"node {node.name} bears epoch {node.epoch}, this leader has {self._epoch()}")
        metadata = {"labels": {LOAN_LABEL: loan}, "annotations": {EPOCH_ANNOTATION: str(self._epoch())}}
        change = {"metadata": metadata, "spec": {"taints": taints or None}}
        changed = self._cluster.patch(NODE, node.name, change=change, resource_version=node.resource_version)
        self._mirrors.put_ahead(NODE, changed)
        logger.info("node %s %s", node.name, f"is lent, loan {loan}" if loan else "is given back")

    def _evict(self, pod: PodFacts) -> None:
        if self._cluster.evict(pod.as_object()) is Eviction.REFUSED:
            logger.info("pod %s/%s may not be disrupted now: it is asked again", pod.namespace, pod.name)
