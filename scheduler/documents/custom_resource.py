"""Custom resources on Kubernetes: the spec of a Pool, and the manifest of an ElasticJob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from scheduler.documents.demand_source import (
    DemandQuerySpec,
    Labels,
    RequestQuerySpec,
    check_requested_names,
    check_requested_once,
    check_stale_after,
)
from scheduler.documents.document import (
    CAMEL_CASE,
    Document,
    InvalidDocumentError,
    InvalidField,
    Label,
    Text,
    invalid_field,
    parse_document,
    to_printable,
)
from scheduler.documents.fleet import (
    LendingDocument,
    NodeCount,
    check_lookahead_spans,
    check_lost_after_stale,
    check_one_risk,
    to_lending_policy,
)
from scheduler.documents.job_labels import select_object_labels
from scheduler.documents.pool_calendar import CronText, DemandProfile, OptionalZoneName, ZoneName
from scheduler.documents.prefetch import PrefetchSpec
from scheduler.documents.serving import SERVED_MODELS_MAX, PoolModels, check_served_names, to_served_model
from scheduler.documents.standby import StandbySpec
from scheduler.documents.units import Duration, PositiveDuration, Size
from scheduler.domain.demand_source import (
    DEMAND_STALE_S,
    PROMQL_LENGTH_MAX,
    QUERIES_MAX,
    DemandQuery,
    PrometheusDemand,
    UtilisationSignalError,
    check_no_utilisation,
)
from scheduler.domain.fleet import Pool, PoolKind, PoolNetwork
from scheduler.domain.lending_policy import KNOWN_EVENTS_MAX, SHORTAGE_TARGET_MAX, LendingMode, LendingPolicy

_DEFAULT_LENDING = LendingPolicy()


class _NameDocument(Document):
    name: Label


class BlackoutSpec(Document):
    """A daily window from `start` to `end`, or windows of `duration` that begin at the times of `cron`."""

    model_config = CAMEL_CASE
    start: Duration | None = None
    end: Duration | None = None
    cron: CronText | None = None
    duration: PositiveDuration | None = None
    time_zone: OptionalZoneName | None = None

    def to_document(self) -> dict[str, object]:
        return _rename(self, {"start": "start_s", "end": "end_s", "duration": "duration_s"})


class KnownEventSpec(Document):
    """A time of unusual demand, which begins at `start` (ISO 8601; without an offset, local to the pool)."""

    model_config = CAMEL_CASE
    name: Text
    start: Text
    duration: PositiveDuration
    gpus: float | None = None
    factor: float | None = None

    def to_document(self) -> dict[str, object]:
        return _rename(self, {"start": "start_s", "duration": "duration_s"})


def _rename(spec: Document, names: Mapping[str, str]) -> dict[str, object]:
    """Return the values that the spec gives, by the names of the REST document."""
    return {names.get(name, name): value for name, value in spec.model_dump(exclude_unset=True).items()}


class LendingSpec(Document):
    """Lending policy of a Pool. Omitted fields keep their defaults."""

    model_config = CAMEL_CASE
    enabled: Annotated[bool, Field(strict=True)] = _DEFAULT_LENDING.enabled
    shortage_target: Annotated[float, Field(strict=True, gt=0, le=SHORTAGE_TARGET_MAX)] | None = None
    quantile: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None
    headroom: Annotated[float, Field(strict=True, ge=0, lt=1)] = _DEFAULT_LENDING.headroom
    max_lent_nodes: NodeCount | None = _DEFAULT_LENDING.lent_nodes_max
    min_kept_nodes: NodeCount = _DEFAULT_LENDING.kept_nodes_min
    min_loan: Duration = _DEFAULT_LENDING.loan_s_min
    return_deadline: Duration = _DEFAULT_LENDING.return_deadline_s
    cold_start: Duration = _DEFAULT_LENDING.cold_start_s
    blackouts: Annotated[list[BlackoutSpec], Field(max_length=100)] = Field(default_factory=list)
    time_zone: ZoneName = _DEFAULT_LENDING.time_zone
    known_events: Annotated[list[KnownEventSpec], Field(max_length=KNOWN_EVENTS_MAX)] = Field(default_factory=list)
    demand_profile: DemandProfile = Field(default_factory=list)
    mode: LendingMode = _DEFAULT_LENDING.mode
    notice: Duration = _DEFAULT_LENDING.notice_s
    veto_period: Duration = _DEFAULT_LENDING.veto_s
    standby: StandbySpec | None = None
    prefetch: PrefetchSpec | None = None

    @model_validator(mode="after")
    def _check_risk(self) -> Self:
        check_one_risk(self.quantile, self.shortage_target, field="shortageTarget")
        return self

    @model_validator(mode="after")
    def _check_lookahead(self) -> Self:
        check_lookahead_spans(
            {"minLoan": self.min_loan, "returnDeadline": self.return_deadline, "coldStart": self.cold_start},
            deadline="returnDeadline",
            cold_start="coldStart",
        )
        return self


class DemandSpec(Document):
    """Source of the number of GPUs that a pool's inference needs. A stale reading permits no new loans.

    Without a reading for `lostAfter`, all loans of the pool are recalled.
    """

    model_config = CAMEL_CASE
    source: Literal["deployments", "prometheus", "push", "requests"]
    selector: Labels | None = None
    query: Annotated[str, Field(min_length=1, max_length=PROMQL_LENGTH_MAX)] | None = None
    stale_after: PositiveDuration | None = None
    queries: Annotated[list[DemandQuerySpec], Field(min_length=1, max_length=QUERIES_MAX)] | None = None
    requests: Annotated[list[RequestQuerySpec], Field(min_length=1, max_length=SERVED_MODELS_MAX)] | None = None
    lost_after: PositiveDuration | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        for field, value, source in (
            ("selector", self.selector, "deployments"),
            ("query", self.query, "prometheus"),
            ("queries", self.queries, "prometheus"),
            ("requests", self.requests, "requests"),
        ):
            if value is not None and self.source != source:
                raise invalid_field(field, value, f"nothing, unless source is {source}")
        if self.source == "deployments" and self.selector is None:
            raise invalid_field("selector", None, "a value; source deployments requires it")
        if self.source == "prometheus" and (self.query is None) is (self.queries is None):
            raise invalid_field("query", self.query, "a value, or queries; source prometheus requires one of the two")
        if self.source == "requests" and self.requests is None:
            raise invalid_field("requests", None, "a value; source requests requires it")
        check_requested_once(self.requests or ())
        return self

    @model_validator(mode="after")
    def _check_ages(self) -> Self:
        if self.stale_after is not None:
            check_stale_after(self.stale_after, field="staleAfter")
        check_lost_after_stale(self.stale_after, self.lost_after, field="lostAfter")
        return self

    @model_validator(mode="after")
    def _check_signal(self) -> Self:
        if self.query is not None:
            try:
                check_no_utilisation(self.query)
            except UtilisationSignalError as error:
                raise invalid_field("query", self.query, f"a query of how many GPUs are needed; {error}") from None
        return self


class TolerationSpec(Document):
    """A toleration of node taints. An empty key or an absent effect matches all."""

    model_config = CAMEL_CASE
    key: Text = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: Text = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None

    @model_validator(mode="after")
    def _check_operator(self) -> Self:
        if self.operator == "Equal" and not self.key:
            raise invalid_field("key", self.key, "the key of a taint, unless operator is Exists")
        if self.operator == "Exists" and self.value:
            raise invalid_field("value", self.value, "nothing, unless operator is Equal")
        return self


class NetworkSpec(Document):
    """The network between the nodes of a Pool: bytes per second on one port, and the start-up time of a message."""

    model_config = CAMEL_CASE
    bandwidth: Size
    latency: Duration
    nics_per_node: Annotated[int, Field(strict=True)] = 1


class PoolSpec(Document):
    """Spec of a Pool: the nodes that have all labels of `nodeSelector`.

    Without `gpu`, the labels of each node name its GPU model. Nothing starts on nodes with taints that `tolerations` do
    not cover, except taints with the key nvidia.com/gpu.
    """

    model_config = CAMEL_CASE
    kind: PoolKind
    node_selector: Labels
    gpu: Text = ""
    gpu_memory: Size | None = None
    tolerations: Annotated[list[TolerationSpec], Field(max_length=16)] = Field(default_factory=list)
    network: NetworkSpec | None = None
    lending: LendingSpec | None = None
    demand: DemandSpec | None = None
    serving: PoolModels = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_inference_fields(self) -> Self:
        for field, value in (("lending", self.lending), ("demand", self.demand), ("serving", self.serving or None)):
            if self.kind is PoolKind.TRAINING and value is not None:
                raise invalid_field(field, "given", f"nothing; only pools of kind inference have {field}")
        check_served_names(self.serving)
        standby = None if self.lending is None else self.lending.standby
        if standby is not None and self.gpu_memory is not None and standby.gpu_memory >= self.gpu_memory:
            less = f"less than gpuMemory, which is {self.gpu_memory} bytes"
            raise invalid_field("lending.standby.gpuMemory", standby.gpu_memory, less)
        self._check_demand_of_models()
        return self

    def _check_demand_of_models(self) -> None:
        """Check that the requests for all models are pushed or polled."""
        demand, models = self.demand, {each.model for each in self.serving}
        if demand is not None and demand.requests is not None:
            check_requested_names("demand.requests", {each.model for each in demand.requests}, models)
        elif models and demand is not None and demand.source != "push":
            allowed = f"nothing with demand.source {demand.source}; use push or requests"
            raise invalid_field("serving", "given", allowed)


def pool_from_spec(name: str, spec: PoolSpec) -> Pool:
    """Convert the spec of a Pool.

    Raises:
        InvalidDocumentError: the name or a figure of the network is invalid, or LendingPolicy rejects a value.
    """
    parse_document(_NameDocument, {"name": name})
    serving = tuple(map(to_served_model, spec.serving))
    return Pool(name, spec.kind, _lending_policy(spec.lending, spec.demand), _network(spec.network), serving=serving)


def _network(spec: NetworkSpec | None) -> PoolNetwork | None:
    if spec is None:
        return None
    try:
        return PoolNetwork(float(spec.bandwidth), spec.latency, spec.nics_per_node)
    except ValueError as error:
        raise InvalidDocumentError(InvalidField("network", None, str(error))) from None


def _lending_policy(spec: LendingSpec | None, demand: DemandSpec | None) -> LendingPolicy:
    spec = spec or LendingSpec()
    document = {
        "enabled": spec.enabled,
        "quantile": spec.quantile,
        "shortage_target": spec.shortage_target,
        "headroom": spec.headroom,
        "return_deadline_s": spec.return_deadline,
        "cold_start_s": spec.cold_start,
        "kept_nodes_min": spec.min_kept_nodes,
        "lent_nodes_max": spec.max_lent_nodes,
        "loan_s_min": spec.min_loan,
        "demand_stale_s": _demand_stale_s(demand),
        "demand_lost_s": None if demand is None else demand.lost_after,
        "blackouts": [each.to_document() for each in spec.blackouts],
        "time_zone": spec.time_zone,
        "known_events": [each.to_document() for each in spec.known_events],
        "demand_profile": spec.demand_profile,
        "mode": spec.mode,
        "notice_s": spec.notice,
        "veto_s": spec.veto_period,
        "standby": None if spec.standby is None else spec.standby.to_document(),
        "prefetch": None if spec.prefetch is None else spec.prefetch.to_document(),
    }
    return to_lending_policy(parse_document(LendingDocument, document))


def prometheus_demand_from_spec(spec: DemandSpec) -> PrometheusDemand:
    """Convert a spec with source prometheus or requests: one query of GPUs, queries with units, or requests."""
    stale_s = DEMAND_STALE_S if spec.stale_after is None else spec.stale_after
    if spec.requests is not None:
        return PrometheusDemand((), stale_s, tuple(each.to_requests() for each in spec.requests))
    if spec.queries is not None:
        return PrometheusDemand(tuple(each.to_term() for each in spec.queries), stale_s)
    assert spec.query is not None
    return PrometheusDemand((DemandQuery(spec.query),), stale_s)


def _demand_stale_s(demand: DemandSpec | None) -> float | None:
    """Return the age at which demand is stale. None is the service's setting, the default for pushed demand."""
    if demand is None or (demand.source == "push" and demand.stale_after is None):
        return None
    return DEMAND_STALE_S if demand.stale_after is None else demand.stale_after


ELASTIC_JOB_KIND = "ElasticJob"
ELASTIC_JOB_API_VERSION = "ebbtide.dev/v1alpha1"


def is_manifest(document: Mapping[str, Any]) -> bool:
    return "apiVersion" in document or "kind" in document


def manifest_to_job_document(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job document in an ElasticJob manifest. Name, namespace and labels come from its metadata.

    The same file thus serves `kubectl apply` and `ebbtide submit`.

    Raises:
        InvalidDocumentError: the manifest is no ElasticJob, or uses a field that only the operator supports.
    """
    for field, expected in (("apiVersion", ELASTIC_JOB_API_VERSION), ("kind", ELASTIC_JOB_KIND)):
        if manifest.get(field) != expected:
            raise InvalidDocumentError(
                InvalidField(field, to_printable(manifest.get(field)), f"{expected}, or a plain job document")
            )
    spec, metadata = _get_object(manifest, "spec"), _get_object(manifest, "metadata")
    if spec.get("suspend"):
        raise InvalidDocumentError(
            InvalidField("spec.suspend", "true", "false; submit the job, then run `ebbtide suspend`")
        )
    if spec.get("managedBy"):
        raise InvalidDocumentError(
            InvalidField(
                "spec.managedBy", to_printable(spec["managedBy"]), "nothing; outside Kubernetes, Ebbtide runs every job"
            )
        )
    named = {field: metadata[field] for field in ("name", "namespace") if field in metadata}
    if "labels" in spec:
        raise InvalidDocumentError(InvalidField("spec.labels", None, "nothing; set metadata.labels instead"))
    if labels := select_object_labels(_get_object(metadata, "labels")):
        named["labels"] = labels
    return {**named, **{field: value for field, value in spec.items() if field not in ("suspend", "managedBy")}}


def _get_object(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = manifest.get(name, {})
    if not isinstance(part, Mapping):
        raise InvalidDocumentError(InvalidField(name, to_printable(part), "an object"))
    return part
