"""Models that an inference pool serves, the requests that were reported for them, and the replicas proposed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

RATE_MAX = 1e9
"""Largest request rate in requests/s that is taken for a rate and not for a mistake."""
RATE_FORECAST_STALE_S = 900.0


class SizingMode(StrEnum):
    """Treatment of the number of replicas of a model.

    OFF: none; demand is what the present requests need. ADVISE: a number is proposed. SCALE: on Kubernetes, the target
    gets the proposed number of replicas.
    """

    OFF = "off"
    ADVISE = "advise"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """A Kubernetes object whose replicas serve a model. `resource` is the plural of its kind, as in URLs."""

    api_version: str
    kind: str
    namespace: str
    name: str
    resource: str

    def describe(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class SizingPolicy:
    """How the replicas of a model follow its requests.

    Args:
        replicas_min, replicas_max: bounds on the proposed number. Without a maximum, requests alone decide.
        start_s: time from the start of a replica until it serves. The proposal covers the forecast over it.
        stabilization_s: a lower number is proposed once nothing more was needed for as long.
        target: the object that is scaled. Required with SCALE.
    """

    mode: SizingMode = SizingMode.OFF
    replicas_min: int = 0
    replicas_max: int | None = None
    start_s: float = 300.0
    stabilization_s: float = 600.0
    target: ScaleTarget | None = None

    def __post_init__(self) -> None:
        if self.replicas_min < 0:
            raise ValueError(f"sizing.minReplicas is {self.replicas_min}. Use 0 or more.")
        if self.replicas_max is not None and self.replicas_max < max(self.replicas_min, 1):
            raise ValueError(
                f"sizing.maxReplicas is {self.replicas_max}, but sizing.minReplicas is {self.replicas_min}. "
                f"Use {max(self.replicas_min, 1)} or more."
            )
        if not (self.start_s > 0 and self.stabilization_s >= 0):
            raise ValueError(
                f"sizing.startup is {self.start_s:g} s and sizing.stabilization is {self.stabilization_s:g} s. "
                "Use a startup above 0 and a stabilization of at least 0."
            )
        if self.mode is SizingMode.SCALE and self.target is None:
            raise ValueError("sizing.target is missing. Name the object to scale, or use the mode `advise`.")

    def clamp(self, replicas: int) -> int:
        """Return the number within the bounds of the policy."""
        raised = max(replicas, self.replicas_min)
        return raised if self.replicas_max is None else min(raised, self.replicas_max)


@dataclass(frozen=True, slots=True)
class RequestLength:
    """Requests of one length: prompt and output in tokens, and their number or weight."""

    prompt: int
    output: int
    requests: float = 1.0


@dataclass(frozen=True, slots=True)
class ReportedRequests:
    """Requests for a model: rate per second, SCV of the times between them, and lengths if not those of the pool."""

    model: str
    rate_per_s: float
    arrival_scv: float = 1.0
    lengths: tuple[RequestLength, ...] = ()


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Means and 95th percentiles of the prompts and outputs of requests, in tokens."""

    prompt_mean: float
    prompt_p95: float
    output_mean: float
    output_p95: float


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Mean latencies in seconds of one replica, at a rate in requests/s or at a number of requests in flight."""

    prompt: int
    output: int
    tpot_s: float
    ttft_s: float | None = None
    rate_per_s: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a pool serves on replicas of equal GPUs. `scheduler.documents.serving` describes the fields.

    `kv_tokens` None: derived from the memory of the GPU. A share `percentile` of requests meets the bounds `ttft_s` on
    the time to first token and `tpot_s` on the time per output token.
    """

    model: str
    gpu: str
    ttft_s: float
    tpot_s: float
    percentile: float = 0.95
    tensor_degree: int = 1
    memory_share: float = 0.9
    batched_tokens: int = 2048
    sequences: int = 256
    kv_tokens: int | None = None
    measurements: tuple[MeasuredRun, ...] = ()
    lengths: tuple[RequestLength, ...] = ()
    sizing: SizingPolicy = field(default_factory=SizingPolicy)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Requests for a model at a reading, and the replicas that meet its objective.

    Attributes:
        rate_per_s: requests per second. `arrival_scv`: squared coefficient of variation of the times between them.
        replicas: for the rate, with `gpus` GPUs each. None are needed without requests.
        ahead_rate_per_s: largest rate expected within the start of a replica, at least `rate_per_s`.
        ahead_replicas: for that rate. `steady_replicas`: for slightly more than that, so that noise in the rate does
            not change a number once it is proposed.
        ttft_s, tpot_s: expected at the objective's percentile with `replicas`; 0 without requests.
        utilization: part of the time that requests add to iterations.
        binding: the limit that one replica less would exceed.
        lengths: of the requests. None in readings of earlier releases.
    """

    model: str
    rate_per_s: float
    arrival_scv: float
    replicas: int
    gpus: int
    ahead_rate_per_s: float
    ahead_replicas: int
    steady_replicas: int
    ttft_s: float
    tpot_s: float
    utilization: float
    binding: str
    lengths: LengthSummary | None = None


@dataclass(frozen=True, slots=True)
class ModelRate:
    """Largest request rate of a model expected within `horizon_s` seconds, at the level `quantile`."""

    model: str
    made_at_s: float
    horizon_s: float
    quantile: float
    rate_per_s: float
    is_calibrated: bool = True

    def find_rate(self, rate_per_s: float, now_s: float) -> float:
        """Return the rate to be ready for while the reported one is `rate_per_s`.

        A forecast that is not calibrated, or older than `RATE_FORECAST_STALE_S`, does not count.
        """
        is_usable = self.is_calibrated and now_s - self.made_at_s <= RATE_FORECAST_STALE_S
        return max(rate_per_s, self.rate_per_s) if is_usable else rate_per_s


def name_rate_series(pool: str, model: str) -> str:
    """Return the name under which the readings of a model's request rate are stored. No pool has such a name."""
    return f"{pool}/{model}"
