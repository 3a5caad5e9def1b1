"""Figures of shipped GPU profiles that no datasheet gives, taken from the most similar GPU that was measured.

`python -m tools.gpu_presets` rewrites them in `scheduler/solver/profiles/data/gpus`, after the constants of a measured
GPU were fitted again. The sources in a profile tell which figures are derived, and from which GPU:

* `estimate: as NAME, ...`: the figure of that profile;
* `...; estimate: the share of it that NAME reaches`: the bandwidth of the datasheet times that share. NAME is the
  profile's relative, from which it also takes every figure that it does not state.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from scheduler.domain.machine import GpuDevice
from scheduler.solver.profiles.estimated_gpu import list_reported_gpus

TARGET = Path(__file__).resolve().parents[1] / "scheduler" / "solver" / "profiles" / "data" / "gpus"
_COPIED = re.compile(r"estimate: as ([a-z0-9.-]+), ")
_SHARED = re.compile(r".*; estimate: the share of it that ([a-z0-9.-]+) reaches")
_BANDWIDTH = "memory_bandwidth_bytes_per_s"
_OWN = {"dimensions", "collectives", "gpus_per_nic", "precisions", "prediction_error", "fp8_speedup"}
"""Fields that belong to the chip or the node and are never taken from another GPU."""
Document = dict[str, Any]


def build_presets() -> dict[str, str]:
    """Return the text of each derived profile by file name."""
    documents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(TARGET.glob("*.json"))}
    texts = {}
    for name, document in documents.items():
        if shared := _SHARED.fullmatch(document[_BANDWIDTH]["source"]):
            texts[f"{name}.json"] = json.dumps(_derive(document, shared[1], documents), indent=2) + "\n"
    return texts


def write_presets() -> None:
    for name, text in build_presets().items():
        (TARGET / name).write_text(text, encoding="utf-8")


def _derive(document: Document, relative: str, documents: dict[str, Document]) -> Document:
    derived = dict(document)
    for field, entry in documents[relative].items():
        if field not in _OWN | derived.keys():
            derived[field] = entry | {"source": f"estimate: as {relative}, the most similar known GPU"}
    for field, entry in derived.items():
        if field != "gpu" and (copied := _COPIED.match(entry["source"])):
            derived[field] = documents[copied[1]][field] | {"source": entry["source"]}
    bytes_per_s = {each.profile: _compute_peak_bytes_per_s(each.device) for each in list_reported_gpus()}
    share = documents[relative][_BANDWIDTH]["value"] / bytes_per_s[relative]
    derived[_BANDWIDTH] = derived[_BANDWIDTH] | {"value": float(f"{share * bytes_per_s[document['gpu']]:.3g}")}
    return derived


def _compute_peak_bytes_per_s(device: GpuDevice) -> float:
    return device.memory_clock_hz * device.memory_bus_bits / 4


if __name__ == "__main__":
    write_presets()
