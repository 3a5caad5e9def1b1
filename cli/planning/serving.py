"""Capacity of served models: from a serving document to a sized pool, and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.inputs import input_errors_from, load_hardware, raise_input_error, read_text
from cli.output import (
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_time,
    render_facts,
    render_table,
    stack,
)
from scheduler.documents.serving import ServingModelDocument, read_request_lengths, to_served_model
from scheduler.domain.suggestions import suggest
from scheduler.serving import served_models
from scheduler.serving.calibration import CalibratedCosts
from scheduler.serving.capacity import BindingLimit, Capacity, LatencyObjective
from scheduler.serving.length_classes import LengthClasses
from scheduler.serving.replica_model import ReplicaModel
from scheduler.serving.request_mix import RequestMix, build_request_mix
from scheduler.solver.profiles.catalog import ModelProfile, list_model_names, load_model, parse_model

if TYPE_CHECKING:
    from rich.console import RenderableType

BINDING_SENTENCES = {
    BindingLimit.NONE: "One replica is enough.",
    BindingLimit.TTFT: "With one replica less, prompts would wait too long for their first token.",
    BindingLimit.TPOT: "With one replica less, iterations would be too long for the time per output token.",
    BindingLimit.KV_CACHE: "With one replica less, the KV cache would overflow too often.",
    BindingLimit.SEQUENCES: "With one replica less, too many requests would run at once.",
    BindingLimit.THROUGHPUT: "With one replica less, the pool could not keep up with the requests.",
}


def build_replica(document: ServingModelDocument, source: str) -> tuple[ReplicaModel, CalibratedCosts | None]:
    """Return the replica of a document, and what its measurements changed.

    Raises:
        InputError: model or GPU are unknown, the weights do not fit, or the measurements cannot be.
    """
    hardware, model = load_hardware("gpu", document.gpu), _load_served_model(document.model)
    with input_errors_from(source):
        return served_models.build_replica(to_served_model(document), hardware, model)


def _load_served_model(name: str) -> ModelProfile:
    """Return the model preset of this name, else the profile or configuration in the file `name`."""
    known = list_model_names()
    with input_errors_from("model"):
        if name in known:
            return load_model(name)
    if not Path(name).is_file():
        raise_input_error(f"model: {name!r} is neither a file nor a known model{suggest(name, known)}")
    with input_errors_from(f"model {name}"):
        return parse_model(read_text(name))


def build_objective(document: ServingModelDocument) -> LatencyObjective:
    return served_models.get_objective(to_served_model(document))


def build_mix(document: ServingModelDocument, lengths: str, rate: float, burstiness: float) -> RequestMix:
    """Return the mix of the lengths in a CSV file, or of those in the document if `lengths` is empty.

    Raises:
        InputError: the file is invalid, or neither has lengths.
    """
    if not lengths and not document.lengths:
        raise_input_error(
            "--lengths: is missing, and the document has no `lengths`. Give the lengths of some requests."
        )
    with input_errors_from(""):
        if lengths:
            pairs, repeats = read_request_lengths(Path(lengths))
        else:
            pairs = [(each.prompt, each.output) for each in document.lengths]
            repeats = [each.requests for each in document.lengths]
        return build_request_mix(rate, pairs, arrival_scv=burstiness, repeats=repeats)


def to_size_document(capacity: Capacity, replica: ReplicaModel, fitted: CalibratedCosts | None) -> dict[str, Any]:
    """Return the answer of `ebbtide serving size` in plain values."""
    costs = {field: getattr(replica.costs, field) for field in replica.costs.__slots__}
    return {
        "replicas": capacity.replicas,
        "gpus": capacity.gpus,
        "ttft_s": capacity.ttft_s,
        "tpot_s": capacity.tpot_s,
        "running_requests": capacity.running,
        "kv_cache_use": capacity.kv_share,
        "utilization": capacity.utilization,
        "binding": capacity.binding.value,
        "reason": BINDING_SENTENCES[capacity.binding],
        "costs": costs,
        "kv_tokens": replica.limits.kv_tokens,
        "calibration_error": None if fitted is None else fitted.error,
    }


def render_size(capacity: Capacity, objective: LatencyObjective, fitted: CalibratedCosts | None) -> RenderableType:
    share = f"p{100 * objective.percentile:g}"
    costs = "derived from profiles; add `measurements` to calibrate them"
    if fitted is not None:
        costs = f"calibrated; mean error on the measured runs {format_percent(fitted.error)}"
    return render_facts(
        {
            "replicas": format_number(capacity.replicas),
            "GPUs": format_number(capacity.gpus),
            f"TTFT {share}": f"{format_duration(capacity.ttft_s)} of {format_duration(objective.ttft_s)}",
            f"TPOT {share}": f"{format_duration(capacity.tpot_s)} of {format_duration(objective.tpot_s)}",
            "per replica": f"{format_count(round(capacity.running), 'running request')}, "
            f"{format_percent(capacity.kv_share)} of the KV cache",
            "limit": BINDING_SENTENCES[capacity.binding],
            "costs": costs,
        }
    )


def render_advice(pool: Mapping[str, Any]) -> RenderableType:
    """Render the models of a pool, with mean lengths in tokens, what their requests need and what is proposed."""
    rows = [_build_advice_row(each) for each in pool.get("serving", ())]
    return render_table(
        rows,
        headers=[
            "model",
            "requests/s",
            "prompt",
            "output",
            "needed",
            "proposed",
            "since (UTC)",
            "TTFT",
            "TPOT",
            "limit",
        ],
        right_aligned=["requests/s", "prompt", "output", "needed", "proposed", "TTFT", "TPOT"],
        empty=f"Pool {pool['name']} serves no models. Set them with `ebbtide serving set`.",
    )


def _build_advice_row(served: Mapping[str, Any]) -> list[str]:
    load, advice = served["load"], served["advice"]
    proposed = "off" if served["sizing"] == "off" else "-"
    proposed, since = (proposed, "-") if advice is None else (str(advice["replicas"]), format_time(advice["since_s"]))
    if load is None:
        return [served["model"], "-", "-", "-", "-", proposed, since, "-", "-", "-"]
    latencies = [format_duration(load[field]) for field in ("ttft_s", "tpot_s")]
    lengths = load["lengths"]
    tokens = (
        ["-", "-"] if lengths is None else [format_number(lengths[f"{side}_mean"]) for side in ("prompt", "output")]
    )
    numbers = [format_number(load["rate_per_s"], 2), *tokens, str(load["replicas"])]
    return [served["model"], *numbers, proposed, since, *latencies, load["binding"]]


def to_classes_document(found: LengthClasses) -> dict[str, Any]:
    """Return the answer of `ebbtide serving classes` in plain values."""
    total = sum(each.cost for each in found.classes)
    rows = [
        {"above": each.above, "limit": each.limit, "requests": each.requests, "share": each.cost / total}
        for each in found.classes
    ]
    return {"classes": rows, "padding_ratio": found.padding_ratio}


def render_classes(document: dict[str, Any], replicas: tuple[int, ...]) -> RenderableType:
    headers = ["up to tokens", "requests", "share of the work", *(["replicas"] if replicas else [])]
    rows = [
        [
            format_number(each["limit"]),
            format_number(each["requests"]),
            format_percent(each["share"]),
            *([str(replicas[number])] if replicas else []),
        ]
        for number, each in enumerate(document["classes"])
    ]
    table = render_table(rows, headers=headers, right_aligned=headers)
    return stack(table, f"Padding makes the work {document['padding_ratio']:.3f} times that of the unpadded requests.")
