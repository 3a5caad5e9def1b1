"""Metric samples by name and labels, and their changes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from scheduler.telemetry.metrics import render_metrics

Samples = dict[str, float]


def read_samples(text: str | None = None) -> Samples:
    """Return all samples by `name{label="value",...}` with sorted labels, of this process or of a given text."""
    families = text_string_to_metric_families(render_metrics().body.decode() if text is None else text)
    return {_format_key(sample.name, sample.labels): sample.value for family in families for sample in family.samples}


def list_changed_samples(before: Samples) -> Samples:
    """Return the changes of samples since `before`, without buckets."""
    now = read_samples()
    return {
        key: round(value - before.get(key, 0.0), 6)
        for key, value in now.items()
        if value != before.get(key, 0.0) and "_bucket" not in key and "_created" not in key
    }


def _format_key(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name
