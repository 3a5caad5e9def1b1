"""Samples of an exposition, by name and labels, and what has been added to them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from scheduler.telemetry.metrics import exposition

Samples = dict[str, float]


def samples(text: str | None = None) -> Samples:
    """Every sample as `name{label="value",...}`, labels in order; of this process unless a text is given."""
    families = text_string_to_metric_families(exposition().decode() if text is None else text)
    return {_key(one.name, one.labels): one.value for family in families for one in family.samples}


def added(before: Samples) -> Samples:
    """What has changed since, without buckets and what merely is there."""
    now = samples()
    return {
        key: round(value - before.get(key, 0.0), 6)
        for key, value in now.items()
        if value != before.get(key, 0.0) and "_bucket" not in key and "_created" not in key
    }


def _key(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name
