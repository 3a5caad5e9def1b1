"""Sources of inference demand: queries of a Prometheus server, and what is known from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain.serving import ReportedRequests

DEMAND_STALE_S = 300.0
"""Default age at which polled demand is stale, the same as the staleness of a Prometheus sample."""
QUERIES_MAX = 32
PROMQL_LENGTH_MAX = 4096
GPUS_EACH_MAX = 1e6
REQUESTS_EACH_MAX = 1e6
REPLICAS_MAX = 1_000_000
RATE_WINDOW_S, RATE_WINDOW_S_MIN, RATE_WINDOW_S_MAX = 300.0, 30.0, 3_600.0
"""Time over which a preset averages the request rate. Prometheus needs two samples of each series in it."""
BURSTINESS_MIN, BURSTINESS_MAX = 0.01, 100.0
CORRELATION = 0.3
"""Default rank correlation of prompts and outputs. It is enough for true ones up to 0.4, at 5% more replicas than
independence."""
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_UTILISATION_METRIC = re.compile(
    r"DCGM_FI_DEV_(?:GPU|MEM_COPY|ENC|DEC)_UTIL|DCGM_FI_PROF_[A-Z0-9_]*(?:ACTIVE|OCCUPANCY)"
    r"|nvidia_smi_utilization|gpus?_(?:core_)?utili[sz]ation|(?:gpu|accelerator)_duty_cycle"
    r"|nvml_gpu_percent|gpu_gfx_activity|gpu_use_percent",
    re.ASCII | re.IGNORECASE,
)


class UtilisationSignalError(ValueError):
    """A query reads how busy GPUs are, which tells nothing about how many are needed."""


class DemandUnit(StrEnum):
    """Unit of the number that a query returns."""

    GPUS = "gpus"
    REPLICAS = "replicas"
    NODES = "nodes"


class InferenceServer(StrEnum):
    """Servers whose metrics a preset knows."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRITON = "triton"
    TGI = "tgi"
    DYNAMO = "dynamo"
    KSERVE = "kserve"
    LLM_D = "llm-d"
    RAY_SERVE = "ray-serve"


@dataclass(frozen=True, slots=True)
class DemandQuery:
    """PromQL that returns one series or a scalar, or several series that are summed if `sums_series` is set.

    The number counts `unit`, each of which has `gpus_each` GPUs.

    Raises:
        UtilisationSignalError: the query names a metric of GPU utilisation.
        ValueError: another value is out of range.
    """

    promql: str
    unit: DemandUnit = DemandUnit.GPUS
    gpus_each: float = 1.0
    sums_series: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.promql) <= PROMQL_LENGTH_MAX:
            raise ValueError(f"promql must have 1 to {PROMQL_LENGTH_MAX} characters, got {len(self.promql)}")
        _check_range("gpus_each", self.gpus_each, GPUS_EACH_MAX)
        if self.unit is DemandUnit.GPUS and self.gpus_each != 1.0:
            raise ValueError(f"gpus_each must be 1 with unit gpus, got {self.gpus_each:g}")
        check_no_utilisation(self.promql)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The replicas of an inference server that its own metrics ask for, by a preset.

    Args:
        selector: labels that all series of the deployment have.
        gpus_each: GPUs of one replica.
        requests_each: requests that one replica serves at the same time; None for a server whose autoscaler reports
            the number of replicas itself.
        replicas_min: replicas that are needed without any request.
    """

    server: InferenceServer
    selector: Mapping[str, str] = field(default_factory=dict)
    gpus_each: float = 1.0
    requests_each: float | None = None
    replicas_min: int = 1

    def __post_init__(self) -> None:
        _check_selector(self.selector)
        _check_range("gpus_each", self.gpus_each, GPUS_EACH_MAX)
        if (self.requests_each is None) is not (self.server is InferenceServer.KSERVE):
            needs = "nothing" if self.server is InferenceServer.KSERVE else "the requests that one replica serves"
            raise ValueError(f"requests_each must be {needs} for {self.server}, got {self.requests_each}")
        if self.requests_each is not None:
            _check_range("requests_each", self.requests_each, REQUESTS_EACH_MAX)
        if not 0 <= self.replicas_min <= REPLICAS_MAX:
            raise ValueError(f"replicas_min must be 0 to {REPLICAS_MAX}, got {self.replicas_min}")


DemandTerm = DemandQuery | ServerLoad


LENGTH_SERVERS = tuple(each for each in InferenceServer if each is not InferenceServer.KSERVE)
"""Servers that export histograms of prompt and output lengths. Knative, which KServe uses, counts no tokens."""


@dataclass(frozen=True, slots=True)
class RequestQueries:
    """PromQL of the requests for a model.

    `rate` returns requests/s, as one series or a scalar. `prompt_lengths` and `output_lengths` return cumulative
    buckets by `le`, and optionally the sum of tokens as a series without `le`. Empty: the lengths of the served model.
    """

    rate: str
    prompt_lengths: str = ""
    output_lengths: str = ""

    def __post_init__(self) -> None:
        for name in ("rate", "prompt_lengths", "output_lengths"):
            promql = getattr(self, name)
            if len(promql) > PROMQL_LENGTH_MAX or (name == "rate" and not promql):
                raise ValueError(f"{name} must have 1 to {PROMQL_LENGTH_MAX} characters, got {len(promql)}")
        if bool(self.prompt_lengths) is not bool(self.output_lengths):
            raise ValueError("prompt_lengths and output_lengths must be given together")


@dataclass(frozen=True, slots=True)
class ServerRequests:
    """The requests of an inference server, by a preset. `selector` are labels of all series of the deployment."""

    server: InferenceServer
    selector: Mapping[str, str] = field(default_factory=dict)
    window_s: float = RATE_WINDOW_S

    def __post_init__(self) -> None:
        if self.server not in LENGTH_SERVERS:
            raise ValueError(f"server must export lengths, as {', '.join(LENGTH_SERVERS)} do, got {self.server}")
        _check_selector(self.selector)
        if not RATE_WINDOW_S_MIN <= self.window_s <= RATE_WINDOW_S_MAX:
            raise ValueError(
                f"window_s must be {RATE_WINDOW_S_MIN:g} to {RATE_WINDOW_S_MAX:g} seconds, got {self.window_s:g}"
            )


@dataclass(frozen=True, slots=True)
class ModelRequests:
    """The source of requests for a model that the pool serves.

    Args:
        correlation: rank correlation of prompt and output lengths, -1 to 1.
        arrival_scv: squared coefficient of variation of the times between requests.
        replicas: PromQL of the number of replicas. While it is 0, absent series mean no requests. Empty: they mean
            unknown demand.
    """

    model: str
    queries: RequestQueries | ServerRequests
    correlation: float = CORRELATION
    arrival_scv: float = 1.0
    replicas: str = ""

    def __post_init__(self) -> None:
        if not -1 <= self.correlation <= 1:
            raise ValueError(f"correlation must be -1 to 1, got {self.correlation:g}")
        if not BURSTINESS_MIN <= self.arrival_scv <= BURSTINESS_MAX:
            raise ValueError(f"arrival_scv must be {BURSTINESS_MIN} to {BURSTINESS_MAX:g}, got {self.arrival_scv:g}")
        if len(self.replicas) > PROMQL_LENGTH_MAX:
            raise ValueError(f"replicas must have at most {PROMQL_LENGTH_MAX} characters, got {len(self.replicas)}")


@dataclass(frozen=True, slots=True)
class PrometheusDemand:
    """Demand of a pool that Prometheus knows: the sum of `terms`, or what the `requests` for its models need.

    It is unknown while one term or the requests for one model are. A sample older than `stale_after_s` is not used.
    """

    terms: tuple[DemandTerm, ...] = ()
    stale_after_s: float = DEMAND_STALE_S
    requests: tuple[ModelRequests, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.terms) is bool(self.requests) or max(len(self.terms), len(self.requests)) > QUERIES_MAX:
            counts = f"{len(self.terms)} terms and {len(self.requests)} requests"
            raise ValueError(f"a source needs 1 to {QUERIES_MAX} terms, or as many requests, got {counts}")
        if len({each.model for each in self.requests}) < len(self.requests):
            raise ValueError("requests must name each model once")
        if not self.stale_after_s > 0:
            raise ValueError(f"stale_after_s must be above 0, got {self.stale_after_s}")


def check_no_utilisation(promql: str) -> None:
    """Check that a query reads no GPU utilisation.

    Batching keeps a server's GPUs busy at any load above a few requests, and a GPU at 100% may have room for many more.
    NVIDIA defines the utilisation of DCGM_FI_DEV_GPU_UTIL as the share of time in which any kernel ran.

    Raises:
        UtilisationSignalError: the query names a metric of GPU utilisation, wherever it stands in the text.
    """
    if found := _UTILISATION_METRIC.search(promql):
        raise UtilisationSignalError(
            f"{found.group()} is how busy GPUs are, which does not tell how many are needed: batching keeps them busy "
            "at any load. Use a preset, or running and waiting requests divided by what one replica serves"
        )


def describe_source_conflict(source: PrometheusDemand | None, models: Iterable[str]) -> str:
    """Return why a pool that serves `models` cannot have a source; empty if it can."""
    if source is None:
        return ""
    served, requested = set(models), {each.model for each in source.requests}
    if source.terms and served:
        return f"its source returns GPUs, but it serves {', '.join(sorted(served))}, whose requests decide"
    if unknown := sorted(requested - served):
        return f"the requests of its source name {', '.join(unknown)}, which it does not serve"
    if missing := sorted(served - requested):
        return f"the requests of its source lack {', '.join(missing)}, which it serves"
    return ""


def _check_selector(selector: Mapping[str, str]) -> None:
    for name in selector:
        if not _LABEL_NAME.fullmatch(name):
            raise ValueError(f"selector must have label names of letters, digits and _, got {name!r}")


def _check_range(name: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise ValueError(f"{name} must be above 0 and at most {most:g}, got {value:g}")


class UnknownDemandReason(StrEnum):
    """Why a pool's demand is unknown."""

    NO_DEPLOYMENT_MATCHES = "NoDeploymentMatches"
    NO_SERIES = "NoSeries"
    MANY_SERIES = "ManySeries"
    NOT_A_NUMBER = "NotANumber"
    NO_LENGTHS = "NoLengths"
    CANNOT_SERVE = "CannotServe"
    STALE = "Stale"
    UNREACHABLE = "Unreachable"
    BAD_QUERY = "BadQuery"
    NOT_ASKED_YET = "NotAskedYet"
    NOT_PUSHED_YET = "NotPushedYet"


@dataclass(frozen=True, slots=True)
class KnownDemand:
    """Inference needed `gpus` at `at_s`. `requests` are those from which the number follows, if it follows from any."""

    gpus: float
    at_s: float
    requests: tuple[ReportedRequests, ...] = ()


@dataclass(frozen=True, slots=True)
class UnknownDemand:
    """There is no new reading. `message` is stable while the problem persists."""

    reason: UnknownDemandReason
    message: str


PoolDemand = KnownDemand | UnknownDemand
