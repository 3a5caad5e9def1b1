"""Documents of pools and nodes for the REST API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from scheduler.documents.demand_source import DemandSourceDocument, check_requested_models, to_prometheus_demand
from scheduler.documents.document import (
    LABEL_FORM,
    Document,
    InvalidDocumentError,
    InvalidField,
    Label,
    Text,
    invalid_field,
)
from scheduler.documents.pool_calendar import (
    BlackoutDocument,
    DemandProfile,
    KnownEventDocument,
    ZoneName,
    to_blackouts,
    to_known_events,
)
from scheduler.documents.prefetch import PrefetchDocument, to_prefetch
from scheduler.documents.serving import PoolModels, check_served_names, to_served_model
from scheduler.documents.standby import StandbyDocument, to_standby
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
    find_lendable_gpus_problem,
)
from scheduler.domain.lending_policy import (
    DEMAND_LOST_S,
    KNOWN_EVENTS_MAX,
    SHORTAGE_TARGET,
    SHORTAGE_TARGET_MAX,
    LendingMode,
    LendingPolicy,
)

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
LendableGpus = Annotated[
    list[Annotated[int, Field(strict=True, ge=0, lt=NODE_GPUS_MAX)]], Field(max_length=NODE_GPUS_MAX)
]
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


def check_lost_after_stale(stale_s: float | None, lost_s: float | None, *, field: str) -> None:
    """Check that demand is lost only after it is stale. `field` is the name of the age at which it is lost."""
    if stale_s is not None and lost_s is not None and lost_s <= stale_s:
        raise invalid_field(field, lost_s, f"above {stale_s:g} s, the age at which demand is stale")


def describe_as_number(schema: JsonDict) -> None:
    """Describe an optional number to clients as one that they omit, as it was before it became optional."""
    branches = schema.pop("anyOf")
    assert isinstance(branches, list)
    assert isinstance(branches[0], dict)
    schema.update(branches[0])
    del schema["default"]


class LendingDocument(Document):
    """Lending policy of an inference pool. Omitted fields keep their defaults. Durations are seconds, or text such as
    "5m"."""

    enabled: Annotated[bool, Field(strict=True)] = Field(
        default=_DEFAULT_LENDING.enabled, description="Whether the pool lends nodes."
    )
    shortage_target: Annotated[float, Field(strict=True, gt=0, le=SHORTAGE_TARGET_MAX)] | None = Field(
        default=None,
        description="Share of five-minute intervals, over four weeks, in which loans may leave inference short, above "
        f"0 and at most {SHORTAGE_TARGET_MAX:g}. Null: {SHORTAGE_TARGET:g}, or `quantile` decides.",
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
        default_factory=list, description="Windows without new loans, daily or by a cron expression."
    )
    time_zone: ZoneName = Field(
        default=_DEFAULT_LENDING.time_zone,
        description="IANA time zone whose clock demand follows, such as Europe/Berlin. The forecast, windows by a cron "
        "expression and the demand profile use it.",
    )
    known_events: Annotated[list[KnownEventDocument], Field(max_length=KNOWN_EVENTS_MAX)] = Field(
        default_factory=list,
        description="Times of unusual demand. Past ones are ignored. `start_s` without an offset is in `time_zone`.",
    )
    demand_profile: DemandProfile = Field(
        default_factory=list,
        description="Expected demand in GPUs by local hour, 24 numbers for the day or 168 for the week from Monday on. "
        "A pool lends by it before its forecast is calibrated.",
    )

    demand_lost_s: PositiveDuration | None = Field(
        default=_DEFAULT_LENDING.demand_lost_s,
        description=f"Age in seconds of the latest demand reading at which all loans are recalled, above "
        f"`demand_stale_s`. Null: {DEMAND_LOST_S:.0f}, or twice the age at which demand is stale if that is longer.",
    )
    mode: LendingMode = Field(
        default=_DEFAULT_LENDING.mode,
        description="lend: nodes are lent. shadow: the pool decides as if it lent, records what it would lend, and "
        "lends nothing.",
    )
    notice_s: Duration = Field(
        default=_DEFAULT_LENDING.notice_s,
        description="Seconds between the proposal of a loan, which can be vetoed, and the offer. 0: no proposal.",
    )
    veto_s: Duration = Field(
        default=_DEFAULT_LENDING.veto_s,
        description="Seconds for which a node is not proposed again after a veto.",
    )
    standby: StandbyDocument | None = Field(
        default=None,
        description="Replicas that stay on a node while it is lent, asleep or without requests. A node whose replicas "
        "do not become idle is not lent. Null: pods leave a node before it is lent.",
    )
    prefetch: PrefetchDocument | None = Field(
        default=None,
        description="Images and weights that are loaded onto a node before it is lent and before it is returned, on "
        "Kubernetes. Null: none.",
    )

    @model_validator(mode="after")
    def _check_demand_age(self) -> Self:
        check_lost_after_stale(self.demand_stale_s, self.demand_lost_s, field="demand_lost_s")
        return self

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
        if self.standby is not None and self.standby.wake_s is not None:
            check_lookahead_spans(
                {"return_deadline_s": self.return_deadline_s, "standby.wake_s": self.standby.wake_s},
                deadline="return_deadline_s",
                cold_start="standby.wake_s",
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

    demand: DemandSourceDocument | None = Field(
        default=None,
        description="Queries that the service polls for the demand of inference, for kind inference only. Null: demand "
        "is reported with POST /v1/pools/{name}/demand.",
    )

    @model_validator(mode="after")
    def _check_lending_kind(self) -> Self:
        if self.kind is PoolKind.TRAINING and self.lending is not None:
            raise invalid_field("lending", "given", "nothing; only pools of kind inference lend")
        if self.kind is PoolKind.TRAINING and self.demand is not None:
            raise invalid_field("demand", "given", "nothing; only pools of kind inference have demand")
        if self.kind is PoolKind.TRAINING and self.serving:
            raise invalid_field("serving", "given", "nothing; only pools of kind inference serve models")
        check_served_names(self.serving)
        if self.demand is not None:
            check_requested_models(self.demand, (each.model for each in self.serving))
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
    lendable: Annotated[bool, Field(strict=True)] = Field(
        default=True, description="Whether a node of an inference pool can be lent."
    )
    lendable_gpus: LendableGpus = Field(
        default_factory=list,
        description="Indices of the GPUs that a loan takes while inference serves from the others, ascending. Empty: a "
        "loan takes the whole node.",
    )

    @model_validator(mode="after")
    def _check_lendable_gpus(self) -> Self:
        check_lendable_gpus(self.lendable_gpus, self.gpus)
        return self


def check_lendable_gpus(indices: Sequence[int], gpus: int) -> None:
    """Check the lendable GPUs of a node with `gpus` GPUs."""
    if problem := find_lendable_gpus_problem(indices, gpus):
        raise invalid_field("lendable_gpus", list(indices), problem)


def to_lending_document(lending: LendingPolicy) -> dict[str, object]:
    """Return the document of `lending`, in plain JSON values."""
    return asdict(lending)


def to_lending_policy(document: LendingDocument | None, *, zone: str = "") -> LendingPolicy:
    """Convert a lending document. None gives the defaults.

    Args:
        zone: time zone of known events that start at a local time; empty: that of the document.

    Raises:
        InvalidDocumentError: LendingPolicy rejects a value.
    """
    if document is None:
        return LendingPolicy()
    values = document.model_dump(exclude={"blackouts", "known_events", "demand_profile", "standby", "prefetch"})
    try:
        return LendingPolicy(
            **values,
            blackouts=to_blackouts(document.blackouts),
            known_events=to_known_events(document.known_events, zone or document.time_zone),
            demand_profile=tuple(document.demand_profile),
            standby=to_standby(document.standby),
            prefetch=to_prefetch(document.prefetch),
        )
    except ValueError as error:
        raise InvalidDocumentError(InvalidField("lending", None, str(error))) from None


def to_pool(document: PoolDocument) -> Pool:
    network = None if document.network is None else to_pool_network(document.network)
    demand = None if document.demand is None else to_prometheus_demand(document.demand)
    serving = tuple(map(to_served_model, document.serving))
    return Pool(document.name, document.kind, to_lending_policy(document.lending), network, demand, serving)


def to_pool_network(document: PoolNetworkDocument) -> PoolNetwork:
    return PoolNetwork(document.bandwidth_bytes_per_s, document.latency_s, document.nics_per_node)


def to_node(document: NodeDocument, *, gpu_memory_bytes: int) -> Node:
    """Return the node. `gpu_memory_bytes` is the memory of one GPU if the document does not set it."""
    memory_bytes = document.memory or gpu_memory_bytes
    return Node(
        document.name,
        document.pool,
        document.gpu,
        document.gpus,
        memory_bytes,
        lendable=document.lendable,
        lendable_gpus=tuple(document.lendable_gpus),
    )
