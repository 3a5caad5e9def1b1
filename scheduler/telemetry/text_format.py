"""Prometheus' text format, version 0.0.4.

prometheus_client writes it too, byte for byte the same, and takes three times as long, because it is ready for names
and labels of any characters: ours are plain identifiers.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


def rendered(collector: Collector) -> bytes:
    """All families of a collector or registry."""
    return "".join(line for family in collector.collect() for line in _family(family)).encode()


def _family(family: Metric) -> Iterator[str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    text = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"
    for sample in family.samples:
        value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]  # left untyped there
        if sample.labels:
            inside = ",".join([f'{key}="{_escaped(text)}"' for key, text in sorted(sample.labels.items())])
            yield f"{sample.name}{{{inside}}} {value}\n"
        else:
            yield f"{sample.name} {value}\n"


def _escaped(text: str) -> str:
    if '"' in text or "\\" in text or "\n" in text:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return text
