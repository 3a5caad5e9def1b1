"""The document that a scrape receives: text format or OpenMetrics, as the client accepts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CLUSTER_LABEL = "cluster"


class Exposition(NamedTuple):
    body: bytes
    content_type: str


class ClusterCollector(Collector):
    """Collector that adds the label `cluster` to all samples of other collectors. Without a name it adds none."""

    def __init__(self, collectors: Iterable[Collector], cluster: str) -> None:
        self._collectors = tuple(collectors)
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for family in collector.collect():
                if self._cluster:
                    family.samples = [
                        sample._replace(labels={**sample.labels, CLUSTER_LABEL: self._cluster})
                        for sample in family.samples
                    ]
                yield family


def expose(collectors: Iterable[Collector], *, accept: str = "", cluster: str = "") -> Exposition:
    """Render all samples in the format that the header `Accept` prefers. Exemplars are part of OpenMetrics only."""
    registry = CollectorRegistry()
    registry.register(ClusterCollector(collectors, cluster))
    encode, content_type = choose_encoder(accept)
    return Exposition(encode(registry), content_type)
