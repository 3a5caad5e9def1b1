"""Documents of demand sources: queries of Prometheus with their units, and presets of inference servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from scheduler.documents.document import CAMEL_CASE, Document, InvalidDocumentError, InvalidField, Text, invalid_field
from scheduler.documents.units import PositiveDuration
from scheduler.domain.demand_source import (
    DEMAND_STALE_S,
    GPUS_EACH_MAX,
    PROMQL_LENGTH_MAX,
    QUERIES_MAX,
    REPLICAS_MAX,
    REQUESTS_EACH_MAX,
    DemandQuery,
    DemandTerm,
    DemandUnit,
    InferenceServer,
    PrometheusDemand,
    ServerLoad,
    UtilisationSignalError,
    check_no_utilisation,
)

DEMAND_STALE_S_MIN = 15.0
_SERVERS = ", ".join(InferenceServer)
_GPUS_FIELDS = {DemandUnit.REPLICAS: "gpus_per_replica", DemandUnit.NODES: "gpus_per_node"}

Labels = Annotated[dict[Text, Text], Field(min_length=1, max_length=16)]
GpusEach = Annotated[float, Field(strict=True, gt=0, le=GPUS_EACH_MAX)]


class DemandQueryDocument(Document):
    """One summand of a pool's demand: a query in PromQL, or the preset of an inference server."""

    promql: Annotated[str, Field(min_length=1, max_length=PROMQL_LENGTH_MAX)] | None = Field(
        default=None, description="PromQL that returns one series or a scalar. Give `promql` or `preset`."
    )
    unit: DemandUnit | None = Field(
        default=None, description="Unit of the number that `promql` returns: gpus, replicas or nodes. Null: gpus."
    )
    aggregate: Literal["sum"] | None = Field(
        default=None, description="`sum`: `promql` may return several series, which are added. Null: it must not."
    )
    preset: InferenceServer | None = Field(
        default=None, description=f"Inference server whose load is computed from its own metrics: {_SERVERS}."
    )
    selector: Labels | None = Field(
        default=None, description="Labels of the series of a `preset`, such as the namespace and the model."
    )
    requests_per_replica: Annotated[float, Field(strict=True, gt=0, le=REQUESTS_EACH_MAX)] | None = Field(
        default=None,
        description="Requests that one replica of a `preset` serves at the same time, such as --max-num-seqs of vLLM. "
        "Required, except by kserve.",
    )
    replicas_min: Annotated[int, Field(strict=True, ge=0, le=REPLICAS_MAX)] | None = Field(
        default=None, description="Replicas of a `preset` that are needed without any request. Null: 1."
    )
    gpus_per_replica: GpusEach | None = Field(
        default=None, description="GPUs of one replica, for unit replicas and presets. Required there."
    )
    gpus_per_node: GpusEach | None = Field(
        default=None, description="GPUs of one node, for unit nodes. Required there."
    )

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.promql is None) is (self.preset is None):
            raise self._refuse("promql", self.promql, f"a query, or nothing together with preset: {_SERVERS}")
        if self.promql is not None:
            self._check_query(self.promql)
        else:
            self._check_preset()
        return self

    def to_term(self) -> DemandTerm:
        if self.preset is not None:
            assert self.gpus_per_replica is not None
            replicas_min = 1 if self.replicas_min is None else self.replicas_min
            return ServerLoad(
                self.preset, self.selector or {}, self.gpus_per_replica, self.requests_per_replica, replicas_min
            )
        assert self.promql is not None
        unit = self.unit or DemandUnit.GPUS
        gpus_each = getattr(self, _GPUS_FIELDS[unit]) if unit in _GPUS_FIELDS else 1.0
        return DemandQuery(self.promql, unit, gpus_each, self.aggregate is not None)

    def _check_query(self, promql: str) -> None:
        unit = self.unit or DemandUnit.GPUS
        for name in ("selector", "requests_per_replica", "replicas_min"):
            if (value := getattr(self, name)) is not None:
                raise self._refuse(name, value, "nothing, unless preset is given")
        for each, name in _GPUS_FIELDS.items():
            value = getattr(self, name)
            if (value is not None) is not (each is unit):
                allowed = f"a number; unit {each} requires it" if value is None else f"nothing, unless unit is {each}"
                raise self._refuse(name, value, allowed)
        try:
            check_no_utilisation(promql)
        except UtilisationSignalError as error:
            raise self._refuse("promql", promql, f"a query of how many GPUs are needed; {error}") from None

    def _check_preset(self) -> None:
        for name in ("unit", "aggregate", "gpus_per_node"):
            if (value := getattr(self, name)) is not None:
                raise self._refuse(name, value, "nothing together with preset, which counts replicas")
        if self.gpus_per_replica is None:
            raise self._refuse("gpus_per_replica", None, "a number; a preset requires it")
        counts_replicas = self.preset is InferenceServer.KSERVE
        if (self.requests_per_replica is None) is not counts_replicas:
            needed = (
                "nothing; the autoscaler of kserve counts replicas"
                if counts_replicas
                else ("the requests that one replica serves at the same time")
            )
            raise self._refuse("requests_per_replica", self.requests_per_replica, needed)
        try:
            self.to_term()
        except ValueError as error:
            raise self._refuse("selector", self.selector, str(error)) from None

    def _refuse(self, field: str, value: object, allowed: str) -> Exception:
        return invalid_field(_spell_field(self, field), value, allowed)


class DemandSourceDocument(Document):
    """Where the demand of an inference pool comes from: a sum of queries that the service polls."""

    queries: Annotated[list[DemandQueryDocument], Field(min_length=1, max_length=QUERIES_MAX)] = Field(
        description="Summands. The demand is unknown while one of them is."
    )
    stale_after_s: PositiveDuration = Field(
        default=DEMAND_STALE_S,
        description=f"Age in seconds after which a sample is not used, at least {DEMAND_STALE_S_MIN:.0f}.",
    )

    @model_validator(mode="after")
    def _check_stale_after(self) -> Self:
        check_stale_after(self.stale_after_s, field="stale_after_s")
        return self


class DemandQuerySpec(DemandQueryDocument):
    """One summand of a Pool's demand, in the spelling of custom resources."""

    model_config = CAMEL_CASE


def check_stale_after(stale_s: float, *, field: str) -> None:
    """Check that demand is not stale before it can be read again."""
    if stale_s < DEMAND_STALE_S_MIN:
        raise invalid_field(
            field, stale_s, f"at least {DEMAND_STALE_S_MIN:.0f} s, because demand is read every few seconds"
        )


def to_prometheus_demand(document: DemandSourceDocument) -> PrometheusDemand:
    """Convert the document of a source.

    Raises:
        InvalidDocumentError: the domain rejects a value.
    """
    try:
        return PrometheusDemand(tuple(each.to_term() for each in document.queries), document.stale_after_s)
    except ValueError as error:
        raise InvalidDocumentError(InvalidField("demand", None, str(error))) from None


def to_source_document(source: PrometheusDemand) -> dict[str, Any]:
    """Return the document of a source, in plain JSON values, without fields that are not set."""
    return {"queries": [_to_query_document(term) for term in source.terms], "stale_after_s": source.stale_after_s}


def _to_query_document(term: DemandTerm) -> dict[str, Any]:
    if isinstance(term, ServerLoad):
        document: dict[str, Any] = {
            "preset": term.server.value,
            "selector": dict(term.selector) or None,
            "requests_per_replica": term.requests_each,
            "replicas_min": term.replicas_min,
            "gpus_per_replica": term.gpus_each,
        }
    else:
        document = {
            "promql": term.promql,
            "unit": term.unit.value,
            "aggregate": "sum" if term.sums_series else None,
            _GPUS_FIELDS.get(term.unit, "gpus_per_replica"): None if term.unit is DemandUnit.GPUS else term.gpus_each,
        }
    return {name: value for name, value in document.items() if value is not None}


def _spell_field(document: Document, field: str) -> str:
    """Return the name of a field as the document's users write it."""
    return to_camel(field) if document.model_config.get("alias_generator") else field
