"""The document of a served model: model, GPU, latency objective, limits of the engine and measured latencies.

    model: llama-3-8b
    gpu: h100-80g
    tensorDegree: 1
    objective: {ttft: 1s, tpot: 50ms, percentile: 0.95}
    limits: {batchedTokens: 2048, sequences: 256}
    measurements:
      - {rate: 4, prompt: 206, output: 202, ttft: 57ms, tpot: 22.6ms}

    lengths:
      - {prompt: 180, output: 150, requests: 40}
    sizing: {mode: advise, minReplicas: 2, startup: 5m}

A pool of the service keeps such documents for the models that it serves. `ebbtide serving size` also reads lengths from
a CSV file with the columns `prompt`, `output` and, optionally, `requests`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from scheduler.documents.csv_table import TraceError, open_table
from scheduler.documents.document import CAMEL_CASE, Document, Text, invalid_field
from scheduler.documents.units import Duration, PositiveDuration
from scheduler.domain.serving import (
    MeasuredRun,
    RequestLength,
    ScaleTarget,
    ServedModel,
    SizingMode,
    SizingPolicy,
)

TOKENS_MAX = 10_000_000
"""Longest prompt or output that is taken for a length and not for a mistake."""
MEASUREMENTS_MAX = 1_000
LENGTHS_MAX, POOL_MEASUREMENTS_MAX = 256, 32
"""Rows of a model that a pool keeps: they are read with every reading of its demand."""
SERVED_MODELS_MAX = 16
REPLICAS_MAX = 100_000
SIZING_S_MAX = 86_400.0

Tokens = Annotated[int, Field(strict=True, ge=1, le=TOKENS_MAX)]
Name = Annotated[Text, Field(min_length=1)]


class ObjectiveDocument(Document):
    """Bounds on the time to first token and the time per output token, and the share of requests that meets each."""

    model_config = CAMEL_CASE
    ttft: PositiveDuration = Field(description="Bound on the time to first token.")
    tpot: PositiveDuration = Field(description="Bound on the mean time between the tokens of one request.")
    percentile: Annotated[float, Field(ge=0.5, lt=1)] = Field(
        default=0.95, description="Share of requests that meets each bound."
    )


class ServingLimitsDocument(Document):
    """Limits of the engine's batch."""

    model_config = CAMEL_CASE
    batched_tokens: Tokens = Field(
        default=2048, description="Tokens of an iteration, such as vLLM's `--max-num-batched-tokens`."
    )
    sequences: Tokens = Field(default=256, description="Running requests, such as vLLM's `--max-num-seqs`.")
    kv_tokens: Tokens | None = Field(
        default=None, description="Tokens in the KV cache of a replica. Default: derived from memory and weights."
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.sequences >= self.batched_tokens:
            raise invalid_field("sequences", self.sequences, f"below batchedTokens, which is {self.batched_tokens}")
        return self


class MeasurementDocument(Document):
    """Mean latencies of one replica, at a request rate or at a fixed number of requests in flight."""

    model_config = CAMEL_CASE
    rate: Annotated[float, Field(gt=0)] | None = Field(default=None, description="Requests per second.")
    concurrency: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        default=None, description="Requests that were always in flight, instead of `rate`."
    )
    prompt: Tokens = Field(description="Mean prompt in tokens.")
    output: Annotated[int, Field(strict=True, ge=2, le=TOKENS_MAX)] = Field(description="Mean output in tokens.")
    tpot: PositiveDuration = Field(description="Mean time per output token.")
    ttft: PositiveDuration | None = Field(default=None, description="Mean time to first token.")

    @model_validator(mode="after")
    def _check_load(self) -> Self:
        if (self.rate is None) == (self.concurrency is None):
            raise invalid_field("rate", self.rate, "either rate or concurrency, and not both")
        return self


class LengthDocument(Document):
    """Requests of one length."""

    model_config = CAMEL_CASE
    prompt: Tokens = Field(description="Tokens of each of these prompts.")
    output: Tokens = Field(description="Tokens that each of these requests generates.")
    requests: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Number or weight of such requests.")


class ScaleTargetDocument(Document):
    """A Kubernetes object with a `/scale` subresource."""

    model_config = CAMEL_CASE
    api_version: Annotated[Text, Field(min_length=1, max_length=316)] = Field(
        default="apps/v1", description="API group and version of the object."
    )
    kind: Annotated[Text, Field(min_length=1, max_length=63)] = Field(
        default="Deployment", description="Type of the object to scale."
    )
    resource: Annotated[Text, Field(max_length=63)] = Field(
        default="", description="Plural of the kind, as in URLs. Empty: the kind in lower case with its English plural."
    )
    namespace: Annotated[Text, Field(min_length=1, max_length=63)] = Field(
        description="Where the object to scale lives."
    )
    name: Annotated[Text, Field(min_length=1, max_length=253)] = Field(description="Which object to scale.")


class SizingDocument(Document):
    """How the number of replicas follows the requests. Omitted fields keep their defaults."""

    model_config = CAMEL_CASE
    mode: SizingMode = Field(
        default=SizingMode.OFF,
        description="off: nothing is proposed. advise: a number is proposed. scale: the operator sets it on `target`.",
    )
    min_replicas: Annotated[int, Field(strict=True, ge=0, le=REPLICAS_MAX)] = Field(
        default=0, description="Smallest number that is proposed."
    )
    max_replicas: Annotated[int, Field(strict=True, ge=1, le=REPLICAS_MAX)] | None = Field(
        default=None, description="Largest number that is proposed. Null: no limit."
    )
    startup: PositiveDuration = Field(
        default=SizingPolicy().start_s, description="Time from the start of a replica until it serves."
    )
    stabilization: Duration = Field(
        default=SizingPolicy().stabilization_s,
        description="Time for which fewer replicas must have been enough before fewer are proposed.",
    )
    target: ScaleTargetDocument | None = Field(
        default=None, description="Object to scale on Kubernetes. With mode advise, the operator only tells the change."
    )

    @model_validator(mode="after")
    def _check_sizing(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise invalid_field("maxReplicas", self.max_replicas, f"at least minReplicas, which is {self.min_replicas}")
        for field, value_s in (("startup", self.startup), ("stabilization", self.stabilization)):
            if value_s > SIZING_S_MAX:
                raise invalid_field(field, value_s, f"at most {SIZING_S_MAX:.0f} s (one day)")
        if self.mode is SizingMode.SCALE and self.target is None:
            raise invalid_field("target", None, "an object to scale; mode scale requires it")
        return self


class ServingModelDocument(Document):
    """A model that is served on replicas of equal GPUs."""

    model_config = CAMEL_CASE
    model: Name = Field(description="Name of a known model, as in `ebbtide plan`.")
    gpu: Name = Field(description="Name of a known GPU, such as h100-80g.")
    tensor_degree: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=1, description="GPUs of one replica, over which its layers are split."
    )
    memory_share: Annotated[float, Field(gt=0.05, le=1)] = Field(
        default=0.9, description="Part of the GPU memory that the engine uses."
    )
    objective: ObjectiveDocument
    limits: ServingLimitsDocument = Field(default_factory=ServingLimitsDocument)
    measurements: Annotated[list[MeasurementDocument], Field(max_length=MEASUREMENTS_MAX)] = Field(
        default_factory=list, description="Measured runs that calibrate the costs of an iteration."
    )
    lengths: Annotated[list[LengthDocument], Field(max_length=LENGTHS_MAX)] = Field(
        default_factory=list, description="Histogram of the lengths of requests."
    )
    sizing: SizingDocument = Field(
        default_factory=SizingDocument, description="How the number of replicas follows the requests of a pool."
    )


class PoolModelDocument(ServingModelDocument):
    """A model that a pool serves, whose requests can be reported as demand."""

    measurements: Annotated[list[MeasurementDocument], Field(max_length=POOL_MEASUREMENTS_MAX)] = Field(
        default_factory=list, description="Measured runs that calibrate the costs of an iteration."
    )


PoolModels = Annotated[list[PoolModelDocument], Field(max_length=SERVED_MODELS_MAX)]


def check_served_names(models: Iterable[ServingModelDocument]) -> None:
    """Check that each model of a pool has a name of its own, by which its requests are reported."""
    seen = set[str]()
    for number, each in enumerate(models):
        if each.model in seen:
            raise invalid_field(f"serving.{number}.model", each.model, "a model that the pool serves once")
        seen.add(each.model)


def to_served_model(document: ServingModelDocument) -> ServedModel:
    objective, limits, sizing = document.objective, document.limits, document.sizing
    return ServedModel(
        model=document.model,
        gpu=document.gpu,
        ttft_s=objective.ttft,
        tpot_s=objective.tpot,
        percentile=objective.percentile,
        tensor_degree=document.tensor_degree,
        memory_share=document.memory_share,
        batched_tokens=limits.batched_tokens,
        sequences=limits.sequences,
        kv_tokens=limits.kv_tokens,
        measurements=tuple(
            MeasuredRun(each.prompt, each.output, each.tpot, each.ttft, each.rate, each.concurrency)
            for each in document.measurements
        ),
        lengths=to_request_lengths(document.lengths),
        sizing=SizingPolicy(
            sizing.mode,
            sizing.min_replicas,
            sizing.max_replicas,
            sizing.startup,
            sizing.stabilization,
            None if sizing.target is None else _to_scale_target(sizing.target),
        ),
    )


def to_request_lengths(documents: Iterable[LengthDocument]) -> tuple[RequestLength, ...]:
    return tuple(RequestLength(each.prompt, each.output, each.requests) for each in documents)


def _to_scale_target(target: ScaleTargetDocument) -> ScaleTarget:
    resource = target.resource or _guess_plural(target.kind)
    return ScaleTarget(target.api_version, target.kind, target.namespace, target.name, resource)


def _guess_plural(kind: str) -> str:
    """Return the resource of a kind, by the rule with which Kubernetes itself guesses it (apimachinery, api/meta)."""
    name = kind.lower()
    if name.endswith("s"):
        return f"{name}es"
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def to_model_document(served: ServedModel) -> dict[str, Any]:
    """Return the document of a served model in plain JSON values, from which `to_served_model` gives the same model."""
    sizing = served.sizing
    limits = {"batched_tokens": served.batched_tokens, "sequences": served.sequences, "kv_tokens": served.kv_tokens}
    runs = (
        {"rate": run.rate_per_s, "concurrency": run.concurrency, "tpot": run.tpot_s, "ttft": run.ttft_s}
        | {"prompt": run.prompt, "output": run.output}
        for run in served.measurements
    )
    document = PoolModelDocument.model_validate(
        {
            "model": served.model,
            "gpu": served.gpu,
            "tensorDegree": served.tensor_degree,
            "memoryShare": served.memory_share,
            "objective": {"ttft": served.ttft_s, "tpot": served.tpot_s, "percentile": served.percentile},
            "limits": {to_camel(name): value for name, value in limits.items()},
            "measurements": list(runs),
            "lengths": [asdict(each) for each in served.lengths],
            "sizing": {
                "mode": sizing.mode,
                "minReplicas": sizing.replicas_min,
                "maxReplicas": sizing.replicas_max,
                "startup": sizing.start_s,
                "stabilization": sizing.stabilization_s,
                "target": None
                if sizing.target is None
                else {to_camel(name): value for name, value in asdict(sizing.target).items()},
            },
        }
    )
    return document.model_dump(mode="json", by_alias=True)


def read_request_lengths(file: Path) -> tuple[list[tuple[int, int]], list[float]]:
    """Return pairs (prompt, output) in tokens, and the number of requests of each pair.

    Raises:
        TraceError: the file cannot be read, a column is missing or unknown, or a length is no whole number from 1 on.
    """
    table = open_table(file)
    table.check_columns(("prompt", "output"), ("requests",))
    pairs, repeats = [], []
    for row in table.rows:
        lengths = tuple(row.integer(side, minimum=1) for side in ("prompt", "output"))
        if max(lengths) > TOKENS_MAX:
            raise row.cell_error("prompt" if lengths[0] > TOKENS_MAX else "output", f"at most {TOKENS_MAX} tokens")
        pairs.append((lengths[0], lengths[1]))
        repeats.append(row.number("requests", above=0) if "requests" in table.header else 1.0)
    if not pairs:
        raise TraceError(f"{file}: has no requests; add at least one row")
    return pairs, repeats
