"""The document that a scrape receives, as text or OpenMetrics, and its exemplars: traces of recent observations.

prometheus_client keeps no exemplars in multiprocess mode. Each process keeps its own here and writes them to a file
next to its metrics, so that the process that answers a scrape has those of all.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

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


WRITE_INTERVAL_S = 5.0
_FILE_PATTERN = "exemplars_*.json"


class Bucket(NamedTuple):
    """A bucket of a series of a histogram. `labels` are in the order of their names, without `le`."""

    histogram: str
    labels: tuple[tuple[str, str], ...]
    upper_bound: float


class TracedValue(NamedTuple):
    """An observed value, the trace that it belongs to, and its time."""

    trace_id: str
    value: float
    at_s: float


class ExemplarStore:
    """Exemplars that this process recorded. Thread-safe.

    Args:
        folder: where to write them for other processes; None: nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"exemplars_{os.getpid()}.json"
        self._lock = threading.Lock()
        self._exemplars: dict[Bucket, TracedValue] = {}
        self._written_at_s = float("-inf")

    def record(
        self, histogram: str, bounds: tuple[float, ...], labels: Mapping[str, str], exemplar: TracedValue
    ) -> None:
        """Keep an exemplar for the bucket that its value falls into. `bounds` are the upper bounds, in order."""
        at = bisect_left(bounds, exemplar.value)
        bound = bounds[at] if at < len(bounds) else float("inf")
        with self._lock:
            self._exemplars[Bucket(histogram, tuple(sorted(labels.items())), bound)] = exemplar
            if self._path is not None and exemplar.at_s - self._written_at_s >= WRITE_INTERVAL_S:
                self._written_at_s = exemplar.at_s
                _write_file(self._path, self._exemplars)

    def snapshot(self) -> dict[Bucket, TracedValue]:
        with self._lock:
            return dict(self._exemplars)


@dataclass(frozen=True, slots=True)
class TracedHistogram:
    """A histogram that keeps the trace of a recent observation for each bucket in `store`."""

    name: str
    bounds: tuple[float, ...]
    labels: tuple[str, ...]
    histogram: Histogram
    store: ExemplarStore

    def observe(self, value: float, *labels: str, trace_id: str = "", at_s: float = 0.0) -> None:
        """Record a value for these label values. An empty `trace_id` leaves no exemplar; `at_s` is its time."""
        (self.histogram.labels(*labels) if labels else self.histogram).observe(value)
        if trace_id:
            names = dict(zip(self.labels, labels, strict=True))
            self.store.record(self.name, self.bounds, names, TracedValue(trace_id, value, at_s))


def read_exemplars(folder: Path) -> dict[Bucket, TracedValue]:
    """Return the newest exemplar of each bucket from the files of all processes."""
    newest: dict[Bucket, TracedValue] = {}
    for path in folder.glob(_FILE_PATTERN):
        for bucket, exemplar in _read_file(path):
            if bucket not in newest or newest[bucket].at_s < exemplar.at_s:
                newest[bucket] = exemplar
    return newest


def attach_exemplars(families: Iterable[Metric], exemplars: Mapping[Bucket, TracedValue]) -> Iterator[Metric]:
    """Yield the families. Buckets that have an exemplar get it."""
    histograms = {bucket.histogram for bucket in exemplars}
    for family in families:
        if family.name in histograms:
            family.samples = [_with_exemplar(family.name, sample, exemplars) for sample in family.samples]
        yield family


def _with_exemplar(histogram: str, sample: Sample, exemplars: Mapping[Bucket, TracedValue]) -> Sample:
    if "le" not in sample.labels:
        return sample
    labels = tuple(sorted(item for item in sample.labels.items() if item[0] != "le"))
    found = exemplars.get(Bucket(histogram, labels, float(sample.labels["le"])))
    if found is None:
        return sample
    return sample._replace(exemplar=Exemplar({"trace_id": found.trace_id}, found.value, found.at_s))


def _write_file(path: Path, exemplars: Mapping[Bucket, TracedValue]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([(*bucket, *exemplar) for bucket, exemplar in exemplars.items()]), encoding="utf-8")
    draft.replace(path)  # a reader never sees a part of a file


def _read_file(path: Path) -> Iterator[tuple[Bucket, TracedValue]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return  # deleted since the folder was listed
    for histogram, labels, upper_bound, trace_id, value, at_s in json.loads(text):
        names = tuple((name, value) for name, value in labels)
        yield Bucket(histogram, names, upper_bound), TracedValue(trace_id, value, at_s)
