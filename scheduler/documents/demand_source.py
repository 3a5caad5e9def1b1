"""Documents of demand sources: queries of Prometheus with their units, and presets of inference servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from scheduler.documents.document import CAMEL_CASE, Document, InvalidDocumentError, InvalidField, Text, invalid_field
from scheduler.documents.serving import SERVED_MODELS_MAX
from scheduler.documents.units import PositiveDuration
from scheduler.domain.demand_source import (
    BURSTINESS_MAX,
    BURSTINESS_MIN,
    CORRELATION,
    DEMAND_STALE_S,
    GPUS_EACH_MAX,
    LENGTH_SERVERS,
    PROMQL_LENGTH_MAX,
    QUERIES_MAX,
    RATE_WINDOW_S,
    RATE_WINDOW_S_MAX,
    RATE_WINDOW_S_MIN,
    REPLICAS_MAX,
    REQUESTS_EACH_MAX,
    DemandQuery,
    DemandTerm,
    DemandUnit,
    InferenceServer,
    ModelRequests,
    PrometheusDemand,
    RequestQueries,
    ServerLoad,
    ServerRequests,
    UtilisationSignalError,
    check_no_utilisation,
)

DEMAND_STALE_S_MIN = 15.0
_SERVERS, _LENGTH_SERVERS = ", ".join(InferenceServer), ", ".join(LENGTH_SERVERS)
_GPUS_FIELDS = {DemandUnit.REPLICAS: "gpus_per_replica", DemandUnit.NODES: "gpus_per_node"}

Labels = Annotated[dict[Text, Text], Field(min_length=1, max_length=16)]
PromqlText = Annotated[str, Field(min_length=1, max_length=PROMQL_LENGTH_MAX)]
GpusEach = Annotated[float, Field(strict=True, gt=0, le=GPUS_EACH_MAX)]


class DemandQueryDocument(Document):
    """One summand of a pool's demand: a query in PromQL, or the preset of an inference server."""

    promql: PromqlText | None = Field(
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


class RequestQueryDocument(Document):
    """The requests for a model of the pool: the preset of an inference server, or queries in PromQL."""

    model: Text = Field(description="Name of a model that the pool serves.")
    preset: InferenceServer | None = Field(
        default=None, description=f"Inference server whose own metrics tell rate and lengths: {_LENGTH_SERVERS}."
    )
    selector: Labels | None = Field(
        default=None, description="Labels of the series of a `preset`, such as the namespace and the model."
    )
    window: PositiveDuration | None = Field(
        default=None,
        description="Time in seconds over which a `preset` averages the rate, at least two scrape intervals. Null: "
        f"{RATE_WINDOW_S:.0f}.",
    )
    rate: PromqlText | None = Field(
        default=None, description="PromQL of the requests per second. Give `rate` or `preset`."
    )
    prompt_lengths: PromqlText | None = Field(
        default=None,
        description="PromQL of the buckets of prompt lengths by `le`, with the sum of tokens as the series without "
        "`le`. Null: the lengths of the served model.",
    )
    output_lengths: PromqlText | None = Field(
        default=None, description="The same for output lengths. Both are given together."
    )
    correlation: Annotated[float, Field(ge=-1, le=1)] = Field(
        default=CORRELATION,
        description="Rank correlation of prompt and output lengths. 0: independent. 1 needs the most GPUs.",
    )
    burstiness: Annotated[float, Field(ge=BURSTINESS_MIN, le=BURSTINESS_MAX)] = Field(
        default=1.0, description="Squared coefficient of variation of the times between requests. 1: Poisson."
    )
    replicas: PromqlText | None = Field(
        default=None,
        description="PromQL of the number of replicas. While it is 0, absent series mean no requests. Null: they mean "
        "unknown demand.",
    )

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.rate is None) is (self.preset is None):
            raise self._refuse("rate", self.rate, f"a query, or nothing together with preset: {_LENGTH_SERVERS}")
        if self.rate is not None:
            self._check_queries(self.rate)
        elif self.preset is not None:
            self._refuse_given(("prompt_lengths", "output_lengths"), "nothing together with preset, which has its own")
            self._check_preset(self.preset)
        return self

    def to_requests(self) -> ModelRequests:
        return ModelRequests(self.model, self._to_queries(), self.correlation, self.burstiness, self.replicas or "")

    def _to_queries(self) -> RequestQueries | ServerRequests:
        if self.preset is not None:
            return ServerRequests(
                self.preset, self.selector or {}, RATE_WINDOW_S if self.window is None else self.window
            )
        assert self.rate is not None
        return RequestQueries(self.rate, self.prompt_lengths or "", self.output_lengths or "")

    def _check_queries(self, rate: str) -> None:
        self._refuse_given(("selector", "window"), "nothing, unless preset is given")
        if (self.prompt_lengths is None) is not (self.output_lengths is None):
            missing = "prompt_lengths" if self.prompt_lengths is None else "output_lengths"
            raise self._refuse(missing, None, "a query; lengths of prompts and outputs are given together")
        try:
            check_no_utilisation(rate)
        except UtilisationSignalError as error:
            raise self._refuse("rate", rate, f"a query of requests per second; {error}") from None

    def _check_preset(self, preset: InferenceServer) -> None:
        if preset not in LENGTH_SERVERS:
            allowed = f"a server that exports lengths: {_LENGTH_SERVERS}. Name the server inside the {preset} runtime"
            raise self._refuse("preset", preset.value, allowed)
        if self.window is not None and not RATE_WINDOW_S_MIN <= self.window <= RATE_WINDOW_S_MAX:
            allowed = f"{RATE_WINDOW_S_MIN:.0f} to {RATE_WINDOW_S_MAX:.0f} s, and at least two scrape intervals"
            raise self._refuse("window", self.window, allowed)
        try:
            self._to_queries()
        except ValueError as error:
            raise self._refuse("selector", self.selector, str(error)) from None

    def _refuse_given(self, fields: tuple[str, ...], allowed: str) -> None:
        for field in fields:
            if (value := getattr(self, field)) is not None:
                raise self._refuse(field, value, allowed)

    def _refuse(self, field: str, value: object, allowed: str) -> Exception:
        return invalid_field(_spell_field(self, field), value, allowed)


class DemandSourceDocument(Document):
    """Where the demand of an inference pool comes from: queries of Prometheus that the service polls.

    `queries` return GPUs, replicas or nodes. `requests` return requests and their lengths, from which the replicas of
    the pool's models follow.
    """

    queries: Annotated[list[DemandQueryDocument], Field(min_length=1, max_length=QUERIES_MAX)] | None = Field(
        default=None, description="Summands. The demand is unknown while one of them is. Null: give `requests`."
    )
    requests: Annotated[list[RequestQueryDocument], Field(min_length=1, max_length=SERVED_MODELS_MAX)] | None = Field(
        default=None, description="Requests for each model of the pool, instead of `queries`."
    )
    stale_after_s: PositiveDuration = Field(
        default=DEMAND_STALE_S,
        description=f"Age in seconds after which a sample is not used, at least {DEMAND_STALE_S_MIN:.0f}.",
    )

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.queries is None) is (self.requests is None):
            given = None if self.queries is None else "queries and requests"
            raise invalid_field("queries", given, "either queries or requests")
        check_requested_once(self.requests or ())
        return self

    @model_validator(mode="after")
    def _check_stale_after(self) -> Self:
        check_stale_after(self.stale_after_s, field="stale_after_s")
        return self


class DemandQuerySpec(DemandQueryDocument):
    """One summand of a Pool's demand, in the spelling of custom resources."""

    model_config = CAMEL_CASE


class RequestQuerySpec(RequestQueryDocument):
    """The requests for a model of a Pool, in the spelling of custom resources."""

    model_config = CAMEL_CASE


def check_requested_once(requests: Iterable[RequestQueryDocument]) -> None:
    """Check that no model has two entries."""
    seen = set[str]()
    for number, each in enumerate(requests):
        if each.model in seen:
            raise invalid_field(f"requests.{number}.model", each.model, "each model once")
        seen.add(each.model)


def check_requested_models(source: DemandSourceDocument, models: Iterable[str]) -> None:
    """Check that a source has requests for each model that its pool serves, and no other."""
    served = set(models)
    if source.requests is None:
        if served:
            allowed = "nothing with demand.queries; use demand.requests, or report the requests of models"
            raise invalid_field("serving", "given", allowed)
    else:
        check_requested_names("demand.requests", {each.model for each in source.requests}, served)


def check_requested_names(field: str, requested: set[str], served: set[str]) -> None:
    """Check that requests name all served models."""
    if requested != served:
        allowed = f"each model in serving once: {', '.join(sorted(served)) or 'there is none; add it'}"
        raise invalid_field(field, ", ".join(sorted(requested)), allowed)


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
        terms = tuple(each.to_term() for each in document.queries or ())
        requests = tuple(each.to_requests() for each in document.requests or ())
        return PrometheusDemand(terms, document.stale_after_s, requests)
    except ValueError as error:
        raise InvalidDocumentError(InvalidField("demand", None, str(error))) from None


def to_source_document(source: PrometheusDemand) -> dict[str, Any]:
    """Return the document of a source, in plain JSON values, without fields that are not set."""
    document: dict[str, Any] = {"stale_after_s": source.stale_after_s}
    if source.requests:
        return {"requests": [_to_request_document(each) for each in source.requests], **document}
    return {"queries": [_to_query_document(term) for term in source.terms], **document}


def _to_request_document(requests: ModelRequests) -> dict[str, Any]:
    queries = requests.queries
    if isinstance(queries, ServerRequests):
        form: dict[str, Any] = {
            "preset": queries.server.value,
            "selector": dict(queries.selector),
            "window": queries.window_s,
        }
    else:
        form = {
            "rate": queries.rate,
            "prompt_lengths": queries.prompt_lengths,
            "output_lengths": queries.output_lengths,
        }
    document = {"model": requests.model, **form, "replicas": requests.replicas}
    given = {name: value for name, value in document.items() if value}
    return {**given, "correlation": requests.correlation, "burstiness": requests.arrival_scv}


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
