"""Exemplars: the trace of a recent observation, by bucket of a histogram.

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

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

WRITE_INTERVAL_S = 5.0
_FILE_PATTERN = "exemplars_*.json"
BucketKey = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a histogram, and the labels of a bucket in the order of their names."""


class ExemplarStore:
    """Exemplars that this process recorded. Thread-safe.

    Args:
        folder: where to write them for other processes; None: nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"exemplars_{os.getpid()}.json"
        self._lock = threading.Lock()
        self._exemplars: dict[BucketKey, Exemplar] = {}
        self._written_at_s = float("-inf")

    def record(self, histogram: str, bounds: tuple[float, ...], labels: Mapping[str, str], exemplar: Exemplar) -> None:
        """Keep an exemplar for the bucket that its value falls into. `bounds` are the upper bounds, in order."""
        at = bisect_left(bounds, exemplar.value)
        bound = bounds[at] if at < len(bounds) else float("inf")
        bucket = tuple(sorted({**labels, "le": floatToGoString(bound)}.items()))
        with self._lock:
            self._exemplars[histogram, bucket] = exemplar
            if self._path is not None and exemplar.timestamp - self._written_at_s >= WRITE_INTERVAL_S:
                self._written_at_s = exemplar.timestamp
                _write_file(self._path, self._exemplars)

    def snapshot(self) -> dict[BucketKey, Exemplar]:
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
            self.store.record(self.name, self.bounds, names, Exemplar({"trace_id": trace_id}, value, at_s))


def read_exemplars(folder: Path) -> dict[BucketKey, Exemplar]:
    """Return the newest exemplar of each bucket from the files of all processes."""
    newest: dict[BucketKey, Exemplar] = {}
    for path in folder.glob(_FILE_PATTERN):
        for key, exemplar in _read_file(path):
            known = newest.get(key)
            if known is None or known.timestamp < exemplar.timestamp:
                newest[key] = exemplar
    return newest


def attach_exemplars(families: Iterable[Metric], exemplars: Mapping[BucketKey, Exemplar]) -> Iterator[Metric]:
    """Yield the families. Buckets that have an exemplar get it."""
    names = {name for name, _ in exemplars}
    for family in families:
        if family.name in names:
            family.samples = [
                sample._replace(exemplar=exemplars.get((family.name, tuple(sorted(sample.labels.items())))))
                if "le" in sample.labels
                else sample
                for sample in family.samples
            ]
        yield family


def _write_file(path: Path, exemplars: Mapping[BucketKey, Exemplar]) -> None:
    rows = [(*key, exemplar.labels, exemplar.value, exemplar.timestamp) for key, exemplar in exemplars.items()]
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(rows), encoding="utf-8")
    draft.replace(path)  # a reader never sees a part of a file


def _read_file(path: Path) -> Iterator[tuple[BucketKey, Exemplar]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return  # deleted since the folder was listed
    for histogram, bucket, labels, value, at_s in json.loads(text):
        yield (histogram, tuple((name, value) for name, value in bucket)), Exemplar(labels, value, at_s)
