"""Documents of pools and nodes for the REST API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from scheduler.documents.document import (
    LABEL_FORM,
    Document,
    InvalidDocumentError,
    InvalidField,
    Label,
    Text,
    invalid_field,
)
from scheduler.documents.serving import PoolModels, check_served_names, to_served_model
from scheduler.documents.units import Duration, PositiveDuration, Size
from scheduler.domain.fleet import (
    NETWORK_BYTES_PER_S_MAX,
    NETWORK_BYTES_PER_S_MIN,
    NETWORK_LATENCY_S_MAX,
    NICS_PER_NODE_MAX,
    Node,
    Pool,
    PoolKind,
    PoolNetwork,
)
from scheduler.domain.lending_policy import DAY_S, SHORTAGE_TARGET, SHORTAGE_TARGET_MAX, Blackout, LendingPolicy

_HOST_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
HOST_NAME_FORM = "1 to 253 characters of a-z, 0-9, '-' and '.', starting and ending with a letter or digit"
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


def check_lookahead_spans(spans_s: Mapping[str, float], *, deadline: str, cold_start: str) -> None:
    """Check the spans of a lending policy, in seconds by field name, that the forecaster looks ahead over.

    Each of them is at most a day, and return deadline and cold start together are above 0.
    """
    for field, value_s in spans_s.items():
        if value_s > LOOKAHEAD_S_MAX:
            raise invalid_field(field, value_s, f"at most {LOOKAHEAD_S_MAX:.0f} s (one day)")
    if not spans_s[deadline] + spans_s[cold_start]:
        raise invalid_field(deadline, 0.0, f"above 0 s if {cold_start} is 0")


def check_one_risk(quantile: float | None, target: float | None, *, field: str) -> None:
    """Check that a lending policy sets its risk once. `field` is the name of the shortage target."""
    if quantile is not None and target is not None:
        raise invalid_field(field, target, f"nothing together with quantile, which is {quantile:g}; set one of them")


def describe_as_number(schema: JsonDict) -> None:
    """Describe an optional number to clients as one that they omit, as it was before it became optional."""
    branches = schema.pop("anyOf")
    assert isinstance(branches, list)
    assert isinstance(branches[0], dict)
    schema.update(branches[0])
    del schema["default"]


class BlackoutDocument(Document):
    """A daily window without new loans. It may wrap around midnight."""

    start_s: Duration = Field(
        description='First moment of the window, after midnight UTC: seconds, or text such as "22h30m".'
    )
    end_s: Duration = Field(description='End of the window, after midnight UTC: seconds, or text such as "6h".')

    @model_validator(mode="after")
    def _check_time_of_day(self) -> Self:
        for name in ("start_s", "end_s"):
            if getattr(self, name) > DAY_S:
                raise invalid_field(name, getattr(self, name), "at most 24h after midnight UTC")
        return self


class LendingDocument(Document):
    """Lending policy of an inference pool. Omitted fields keep their defaults. Durations are seconds, or text such as
    "5m"."""

    enabled: Annotated[bool, Field(strict=True)] = Field(
        default=_DEFAULT_LENDING.enabled, description="Whether the pool lends nodes."
    )
    shortage_target: Annotated[float, Field(strict=True, gt=0, le=SHORTAGE_TARGET_MAX)] | None = Field(
        default=None,
        description="Share of five-minute intervals, over two weeks, in which loans may leave inference short, above 0 "
        f"and at most {SHORTAGE_TARGET_MAX:g}. Null: {SHORTAGE_TARGET:g}, or `quantile` decides.",
    )
    quantile: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = Field(
        default=None,
        description="Fixed quantile of the demand forecast that nodes that are not lent must cover, between 0 and 1. "
        "Without it, the quantile follows from `shortage_target`. Set one of the two.",
        json_schema_extra=describe_as_number,
    )
    headroom: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=_DEFAULT_LENDING.headroom,
        description="Fraction of the pool's GPUs to keep free in addition to the forecast, 0 to 1.",
    )
    return_deadline_s: Duration = Field(
        default=_DEFAULT_LENDING.return_deadline_s,
        description="Seconds within which a recalled node is returned.",
    )
    cold_start_s: Duration = Field(
        default=_DEFAULT_LENDING.cold_start_s,
        description="Seconds from the return of a node until it serves inference.",
    )
    kept_nodes_min: NodeCount = Field(
        default=_DEFAULT_LENDING.kept_nodes_min, description="Number of nodes that are never lent."
    )
    lent_nodes_max: NodeCount | None = Field(
        default=_DEFAULT_LENDING.lent_nodes_max,
        description="Maximum number of nodes on loan at the same time. Null: no limit.",
    )
    loan_s_min: Duration = Field(
        default=_DEFAULT_LENDING.loan_s_min, description="Shortest expected duration of a loan, in seconds."
    )
    demand_stale_s: PositiveDuration | None = Field(
        default=_DEFAULT_LENDING.demand_stale_s,
        description="Age in seconds after which a demand reading permits no new loans. Null: the service's setting.",
    )
    blackouts: Annotated[list[BlackoutDocument], Field(max_length=100)] = Field(
        default_factory=list, description="Daily windows without new loans."
    )

    @model_validator(mode="after")
    def _check_risk(self) -> Self:
        check_one_risk(self.quantile, self.shortage_target, field="shortage_target")
        return self

    @model_validator(mode="after")
    def _check_lookahead(self) -> Self:
        check_lookahead_spans(
            {
                "loan_s_min": self.loan_s_min,
                "return_deadline_s": self.return_deadline_s,
                "cold_start_s": self.cold_start_s,
            },
            deadline="return_deadline_s",
            cold_start="cold_start_s",
        )
        return self


class PoolNetworkDocument(Document):
    """The network between the nodes of a pool, from which plans on these nodes are computed."""

    bandwidth_bytes_per_s: Annotated[
        float, Field(strict=True, ge=NETWORK_BYTES_PER_S_MIN, le=NETWORK_BYTES_PER_S_MAX)
    ] = Field(
        description="What collectives achieve on one network port, in one direction, in bytes per second. It is less "
        "than the line rate: 200 Gb/s of InfiniBand give about 20e9."
    )
    latency_s: Annotated[float, Field(strict=True, gt=0, le=NETWORK_LATENCY_S_MAX)] = Field(
        description="Start-up time of a collective or a message between two nodes, in seconds, such as 10e-6."
    )
    nics_per_node: Annotated[int, Field(strict=True, ge=1, le=NICS_PER_NODE_MAX)] = Field(
        default=1, description="Number of network ports of a node that carry traffic of jobs."
    )


class PoolDocument(Document):
    name: Label = Field(description=f"Unique label of the pool: {LABEL_FORM}.")
    kind: PoolKind = Field(
        description="training: its nodes run jobs. inference: its nodes serve requests and can be lent."
    )
    lending: LendingDocument | None = Field(
        default=None, description="Limits of loans, for kind inference only. Null: the default policy."
    )
    network: PoolNetworkDocument | None = Field(
        default=None, description="Network between its nodes. Null: that of the profile of their GPU model."
    )
    serving: PoolModels = Field(
        default_factory=list,
        description="Models whose requests can be reported as demand, for kind inference only: the documents of "
        "`ebbtide serving size`.",
    )

    @model_validator(mode="after")
    def _check_lending_kind(self) -> Self:
        if self.kind is PoolKind.TRAINING and self.lending is not None:
            raise invalid_field("lending", "given", "nothing; only pools of kind inference lend")
        if self.kind is PoolKind.TRAINING and self.serving:
            raise invalid_field("serving", "given", "nothing; only pools of kind inference serve models")
        check_served_names(self.serving)
        return self


class NodeDocument(Document):
    """A node with `gpus` GPUs of one model."""

    name: HostName = Field(description=f"Host name, unique in the fleet: {HOST_NAME_FORM}.")
    pool: Label = Field(description="Name of the existing pool that owns it.")
    gpu: Text = Field(description="GPU model, as a profile name such as a100-80g.")
    gpus: Annotated[int, Field(strict=True, ge=1, le=NODE_GPUS_MAX)] = Field(
        description="Number of GPUs that the host has, 1 to 1024."
    )
    memory: Size | None = Field(
        default=None,
        description="Memory of one GPU, in bytes or as text such as 80GiB. Default: that of the GPU model.",
    )


def to_lending_document(lending: LendingPolicy) -> dict[str, object]:
    """Return the document of `lending`, in plain JSON values."""
    return asdict(lending)


def to_lending_policy(document: LendingDocument | None) -> LendingPolicy:
    """Convert a lending document. None gives the defaults.

    Raises:
        InvalidDocumentError: lendingPolicy rejects a value.
    """
    if document is None:
        return LendingPolicy()
    values = document.model_dump(exclude={"blackouts"})
    try:
        return LendingPolicy(**values, blackouts=tuple(Blackout(b.start_s, b.end_s) for b in document.blackouts))
    except ValueError as error:
        raise InvalidDocumentError(InvalidField("lending", None, str(error))) from None


def to_pool(document: PoolDocument) -> Pool:
    network = None if document.network is None else to_pool_network(document.network)
    serving = tuple(map(to_served_model, document.serving))
    return Pool(document.name, document.kind, to_lending_policy(document.lending), network, serving)


def to_pool_network(document: PoolNetworkDocument) -> PoolNetwork:
    return PoolNetwork(document.bandwidth_bytes_per_s, document.latency_s, document.nics_per_node)


def to_node(document: NodeDocument, *, gpu_memory_bytes: int) -> Node:
    """Return the node. `gpu_memory_bytes` is the memory of one GPU if the document does not set it."""
    memory_bytes = document.memory or gpu_memory_bytes
    return Node(document.name, document.pool, document.gpu, document.gpus, memory_bytes)
