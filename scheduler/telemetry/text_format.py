"""Prometheus' text format, version 0.0.4.

prometheus_client writes it too, byte for byte the same, and takes three times as long, because it is ready for names
and labels of any characters: ours are plain identifiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_PLAIN = 1e6
_LABELS_MAX = 50_000


def rendered(collector: Collector) -> bytes:
    """All families of a collector or registry."""
    return "".join(line for family in collector.collect() for line in _family(family)).encode()


def _family(family: Metric) -> Iterator[str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    text = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"
    for sample in family.samples:
        value = sample.value
        # Below a million it is what Python shows; the library's own way is slow.
        shown = repr(float(value)) if -_PLAIN < value < _PLAIN else floatToGoString(value)  # type: ignore[no-untyped-call]
        yield f"{sample.name}{_inside(tuple(sample.labels.items()))} {shown}\n"


@lru_cache(_LABELS_MAX)
def _inside(labels: tuple[tuple[str, str], ...]) -> str:
    """Labels in order and in braces; nothing where there are none."""
    return "{" + ",".join([f'{key}="{_escaped(text)}"' for key, text in sorted(labels)]) + "}" if labels else ""


def _escaped(text: str) -> str:
    if '"' in text or "\\" in text or "\n" in text:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return text
