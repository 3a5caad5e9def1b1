"""The documents of pools and nodes; `lending` is spelled as in the CLUSTER file.

The documents of queues: what a queue's jobs are guaranteed, at most given, and how they share what is left.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import (
    Document,
    InvalidDocumentError,
    InvalidField,
    Label,
    Text,
    invalid_field,
)
from scheduler.documents.units import Duration, PositiveDuration, Size
from scheduler.domain.fleet import DAY_S, Blackout, LendingPolicy, Node, Pool, PoolKind

_HOST_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
HOST_NAME_FORM = "1 to 253 of a-z, 0-9, '-' and '.', beginning and ending with a letter or digit"
NODE_GPUS_MAX = 1024
NODES_MAX = 1_000_000
LOOKAHEAD_S_MAX = 86_400.0
_DEFAULT_LENDING = LendingPolicy()


def _check_host_name(name: str) -> str:
    if not _HOST_NAME.fullmatch(name):
        raise PydanticCustomError("name", "Input should be {form}", {"form": HOST_NAME_FORM})
    return name


HostName = Annotated[str, Field(description=HOST_NAME_FORM), AfterValidator(_check_host_name)]
NodeCount = Annotated[int, Field(strict=True, ge=0, le=NODES_MAX)]


def check_lookahead_spans(**spans_s: float) -> None:
    """For validators of lending rules: the minimum of a loan, the return deadline and the cold start, by field name,
    in this order. The forecaster can look ahead over each of them, and has to look ahead at all."""
    for field, value_s in spans_s.items():
        if value_s > LOOKAHEAD_S_MAX:
            raise invalid_field(field, value_s, f"at most {LOOKAHEAD_S_MAX:.0f} s, which is a day")
    _, deadline, cold_start = spans_s
    if not spans_s[deadline] + spans_s[cold_start]:
        raise invalid_field(deadline, 0.0, f"above 0 s, where {cold_start} is 0")


class BlackoutDocument(Document):
    """A daily window without new loans, in UTC: seconds of the day, or text such as "22h30m"."""

    start_s: Duration
    end_s: Duration

    @model_validator(mode="after")
    def _check_time_of_day(self) -> Self:
        for name in ("start_s", "end_s"):
            if getattr(self, name) > DAY_S:
                raise invalid_field(name, getattr(self, name), "at most 24h, counted from midnight UTC")
        return self


class LendingDocument(Document):
    """What an inference pool's owner allows; absent fields keep the default. No demand is forecast further ahead than
    a day."""

    enabled: Annotated[bool, Field(strict=True)] = _DEFAULT_LENDING.enabled
    quantile: Annotated[float, Field(strict=True, gt=0, lt=1)] = _DEFAULT_LENDING.quantile
    headroom: Annotated[float, Field(strict=True, ge=0, lt=1)] = _DEFAULT_LENDING.headroom
    return_deadline_s: Duration = _DEFAULT_LENDING.return_deadline_s
    cold_start_s: Duration = _DEFAULT_LENDING.cold_start_s
    kept_nodes_min: NodeCount = _DEFAULT_LENDING.kept_nodes_min
    lent_nodes_max: NodeCount | None = _DEFAULT_LENDING.lent_nodes_max
    loan_s_min: Duration = _DEFAULT_LENDING.loan_s_min
    demand_stale_s: PositiveDuration | None = _DEFAULT_LENDING.demand_stale_s
    blackouts: Annotated[list[BlackoutDocument], Field(max_length=100)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_lookahead(self) -> Self:
        check_lookahead_spans(
            loan_s_min=self.loan_s_min, return_deadline_s=self.return_deadline_s, cold_start_s=self.cold_start_s
        )
        return self


class PoolDocument(Document):
    name: Label
    kind: PoolKind
    lending: LendingDocument | None = None

    @model_validator(mode="after")
    def _check_lending_kind(self) -> Self:
        if self.kind is PoolKind.TRAINING and self.lending is not None:
            raise invalid_field("lending", "given", "nothing: only a pool of kind inference lends")
        return self


class NodeDocument(Document):
    """A node of `gpus` GPUs of one model. `memory` of one GPU may be left out: the model says it."""

    name: HostName
    pool: Label
    gpu: Text
    gpus: Annotated[int, Field(strict=True, ge=1, le=NODE_GPUS_MAX)]
    memory: Size | None = None


def to_lending_document(lending: LendingPolicy) -> dict[str, object]:
    """The document that reads as `lending`, in plain JSON values."""
    return asdict(lending)


def to_lending_policy(document: LendingDocument | None) -> LendingPolicy:
    """The domain's form of a lending document; None gives the defaults.

    Raises:
        RefusedError: the domain refuses what the form let through.
    """
    if document is None:
        return LendingPolicy()
    values = document.model_dump(exclude={"blackouts"})
    try:
        return LendingPolicy(**values, blackouts=tuple(Blackout(b.start_s, b.end_s) for b in document.blackouts))
    except ValueError as refused:
        raise InvalidDocumentError(InvalidField("lending", None, str(refused))) from None


def to_pool(document: PoolDocument) -> Pool:
    return Pool(document.name, document.kind, to_lending_policy(document.lending))


def to_node(document: NodeDocument, *, gpu_memory_bytes: int) -> Node:
    """The node, with `gpu_memory_bytes` a GPU where the document does not say it."""
    memory_bytes = document.memory or gpu_memory_bytes
    return Node(document.name, document.pool, document.gpu, document.gpus, memory_bytes)
