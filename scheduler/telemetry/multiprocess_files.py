"""What processes count into the files of a folder (prometheus_client's multiprocess mode), put together.

The library's own collector does the same and decodes and sorts every key anew at each scrape; this one adds up by the
keys as they are and remembers what they mean.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import Collector

_KEYS_MAX = 50_000


@dataclass(frozen=True, slots=True)
class _Series:
    """A key, decoded; `le` and `rest` are the bucket's bound and the other labels, where it is one of a histogram."""

    family: str
    sample: str
    labels: dict[str, str]
    text: str
    le: float
    rest: tuple[tuple[str, str], ...]


class MetricFilesCollector(Collector):
    """Counters and histograms added up; gauges added up or the one set last, as each declares."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def collect(self) -> Iterator[Metric]:
        values: defaultdict[str, dict[str, float]] = defaultdict(dict)
        set_at_s: dict[str, float] = {}
        for path in sorted(self._folder.glob("*.db")):
            kind, mode, *_ = path.stem.split("_")
            known = values[kind]
            for key, value, at_s, _ in _read_rows(path):
                if kind != "gauge" or mode == "livesum":
                    known[key] = known.get(key, 0.0) + value
                elif at_s > set_at_s.get(key, 0.0):
                    known[key], set_at_s[key] = value, at_s
        for kind, told in values.items():
            yield from _build_families(kind, told)


def drop_stale_gauges(folder: str) -> None:
    """Remove gauges of processes that are no more, and of one that had this process's id, as the one before it in a
    container has: a present that was theirs would be shown for ever. Counts stay."""
    for path in Path(folder).glob("gauge_live*.db"):
        process = int(path.stem.rpartition("_")[2])
        if process == os.getpid() or not _is_alive(process):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, who is alive
    return True


def _read_rows(path: Path) -> Iterable[tuple[str, float, float, int]]:
    try:
        rows: Iterable[tuple[str, float, float, int]]
        rows = MmapedDict.read_all_values_from_file(os.fspath(path))  # type: ignore[no-untyped-call]  # as it is there
    except FileNotFoundError:
        return ()  # a gauge of the dead that was removed since the folder was listed
    return rows


def _build_families(kind: str, values: dict[str, float]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    buckets: defaultdict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, str]]] = defaultdict(list)
    for key, value in values.items():
        series = _decode_key(key)
        family = families.get(series.family)
        if family is None:
            family = families[series.family] = Metric(series.family, series.text, kind)
        if series.sample.endswith("_bucket") and kind == "histogram":
            buckets[series.family, series.rest].append((series.le, key))
        else:
            family.add_sample(series.sample, series.labels, value)
    for (name, rest), bounds in buckets.items():
        count = 0.0
        for _, key in sorted(bounds):
            count += values[key]
            families[name].add_sample(f"{name}_bucket", _decode_key(key).labels, count)
        families[name].add_sample(f"{name}_count", dict(rest), count)
    yield from families.values()


@lru_cache(_KEYS_MAX)
def _decode_key(key: str) -> _Series:
    family, sample, labels, text = json.loads(key)
    rest = tuple(sorted((name, value) for name, value in labels.items() if name != "le"))
    return _Series(family, sample, labels, text, float(labels.get("le", "inf")), rest)
