"""The document of a served model: model, GPU, latency objective, limits of the engine and measured latencies.

    model: llama-3-8b
    gpu: h100-80g
    tensorDegree: 1
    objective: {ttft: 1s, tpot: 50ms, percentile: 0.95}
    limits: {batchedTokens: 2048, sequences: 256}
    measurements:
      - {rate: 4, prompt: 206, output: 202, ttft: 57ms, tpot: 22.6ms}

Lengths of requests are a CSV file with the columns `prompt`, `output` and, optionally, `requests`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from scheduler.documents.csv_table import TraceError, open_table
from scheduler.documents.document import CAMEL_CASE, Document, Text, invalid_field
from scheduler.documents.units import PositiveDuration

TOKENS_MAX = 10_000_000
"""Longest prompt or output that is taken for a length and not for a mistake."""
MEASUREMENTS_MAX = 1_000

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


class ServingModelDocument(Document):
    """A model that is served on replicas of equal GPUs."""

    model_config = CAMEL_CASE
    model: Name = Field(description="Model profile.")
    gpu: Name = Field(description="GPU profile.")
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
