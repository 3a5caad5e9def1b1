"""From the requests that a pool reports to the replicas of its models.

Sizes are memoised by rates rounded up to steps of 1% and burstiness rounded up to steps of 5%, so that a reading of a
pool whose rate varies costs a few look-ups. Rounding up means that a size is never too small for the reported rate.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, log, log1p

from scheduler.domain.serving import (
    MeasuredRun,
    ModelLoad,
    ReportedRequests,
    RequestLength,
    ServedModel,
    SizingPolicy,
)
from scheduler.domain.suggestions import suggest
from scheduler.serving.calibration import CalibratedCosts, MeasuredLatency, calibrate_costs
from scheduler.serving.capacity import Capacity, LatencyObjective, PoolSizer
from scheduler.serving.measured_lengths import summarize_lengths
from scheduler.serving.replica_model import BatchLimits, ReplicaModel, count_kv_tokens, derive_costs
from scheduler.serving.request_mix import build_request_mix
from scheduler.solver.profiles.catalog import list_gpu_names, list_model_names, load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.model_profile import ModelProfile

RATE_STEP, SCV_STEP = 0.01, 0.05
STEADY_MARGIN = 0.05
"""Part of the expected rate by which it may fall without fewer replicas being proposed. It is more than the range of a
stationary rate that is counted with 2% noise, from -2% to 2%."""


_SHORTEST = RequestLength(1, 2)
"""Shortest request with a time per output token: an objective that it misses is missed by all."""


class ServedModelError(ValueError):
    """A served model that cannot be sized. `field` is a field of its document, empty if several are involved."""

    def __init__(self, message: str, *, field: str = "", value: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.value = value


def build_replica(
    served: ServedModel, hardware: HardwareProfile, model: ModelProfile
) -> tuple[ReplicaModel, CalibratedCosts | None]:
    """Return the replica of a served model, and what its measurements changed.

    Raises:
        ValueError: the weights do not fit, a limit is out of range, or the measurements cannot be.
    """
    degree = served.tensor_degree
    cached = served.kv_tokens or count_kv_tokens(model, hardware, degree, served.memory_share)
    limits = BatchLimits(served.batched_tokens, served.sequences, cached)
    replica = ReplicaModel(derive_costs(model, hardware, degree), limits, degree)
    if not served.measurements:
        return replica, None
    fitted = calibrate_costs(replica, [_to_latency(each) for each in served.measurements])
    return replace(replica, costs=fitted.costs), fitted


def _to_latency(run: MeasuredRun) -> MeasuredLatency:
    mix = build_request_mix(run.rate_per_s or 1.0, [(run.prompt, run.output)])
    return MeasuredLatency(mix, run.tpot_s, run.ttft_s or 0.0, run.concurrency or 0)


def get_objective(served: ServedModel) -> LatencyObjective:
    return LatencyObjective(served.ttft_s, served.tpot_s, served.percentile)


def check_served_model(served: ServedModel) -> None:
    """Check that the replicas of a model can meet its objective with its lengths, or else with the shortest request.

    Raises:
        ServedModelError: model or GPU are unknown, or no number of replicas meets the objective.
    """
    try:
        sizer = _prepare(served, served.lengths or (_SHORTEST,))
        sizer.check_feasible()
    except ServedModelError:
        raise
    except ValueError as error:
        raise ServedModelError(str(error)) from None


def size_requests(served: ServedModel, requests: ReportedRequests, ahead_rate_per_s: float) -> ModelLoad:
    """Return the replicas for reported requests, and for the rate that is expected within the start of a replica.

    Args:
        ahead_rate_per_s: the expected rate; a lower one than the reported counts as the reported one.

    Raises:
        ServedModelError: as `check_served_model`, or there are no lengths.
        CapacityError: no number of replicas meets the objective at one of the rates.
    """
    lengths = _find_lengths(served, requests)
    ahead_rate_per_s = max(requests.rate_per_s, ahead_rate_per_s)
    sizer, scv = _prepare(served, lengths), requests.arrival_scv
    now, ahead, steady = (
        _size(sizer, rate_per_s, scv)
        for rate_per_s in (requests.rate_per_s, ahead_rate_per_s, ahead_rate_per_s * (1 + STEADY_MARGIN))
    )
    return ModelLoad(
        model=served.model,
        rate_per_s=requests.rate_per_s,
        arrival_scv=scv,
        replicas=0 if now is None else now.replicas,
        gpus=served.tensor_degree,
        ahead_rate_per_s=ahead_rate_per_s,
        ahead_replicas=0 if ahead is None else ahead.replicas,
        steady_replicas=0 if steady is None else steady.replicas,
        ttft_s=0.0 if now is None else now.ttft_s,
        tpot_s=0.0 if now is None else now.tpot_s,
        utilization=0.0 if now is None else now.utilization,
        binding="none" if now is None else now.binding.value,
        lengths=summarize_lengths(lengths),
    )


def count_replicas(served: ServedModel, requests: ReportedRequests) -> int:
    """Return the replicas for reported requests; raises as `size_requests`."""
    if requests.rate_per_s <= 0:
        return 0
    sized = _size(_prepare(served, _find_lengths(served, requests)), requests.rate_per_s, requests.arrival_scv)
    return 0 if sized is None else sized.replicas


def get_kv_tokens(served: ServedModel) -> int:
    """Return the tokens that the KV cache of a replica holds. Raises ServedModelError for unknown models and GPUs."""
    hardware, model = _load_profiles(served)
    return _build_cached_replica(_without_requests(served), hardware, model).limits.kv_tokens


def _find_lengths(served: ServedModel, requests: ReportedRequests) -> tuple[RequestLength, ...]:
    """Return the lengths of the report, or else of the pool. Raises ServedModelError if there are none."""
    if lengths := requests.lengths or served.lengths:
        return lengths
    message = f"neither the report nor the pool has lengths of requests for {served.model}. Give them in one of both."
    raise ServedModelError(message, field="lengths")


def _prepare(served: ServedModel, lengths: tuple[RequestLength, ...]) -> PoolSizer:
    """Return the sizer of a model, with its profiles as they are known to this process now."""
    hardware, model = _load_profiles(served)
    return _build_sizer(_without_requests(served), hardware, model, lengths)


def _without_requests(served: ServedModel) -> ServedModel:
    """Return the model without lengths and sizing, which do not change its replicas."""
    return replace(served, lengths=(), sizing=SizingPolicy())


def _load_profiles(served: ServedModel) -> tuple[HardwareProfile, ModelProfile]:
    for field, name, known in (("gpu", served.gpu, list_gpu_names()), ("model", served.model, list_model_names())):
        if name not in known:
            message = f"`{field}` is {name!r}; use one of {', '.join(known)}{suggest(name, known)}."
            raise ServedModelError(message, field=field, value=name)
    return load_gpu(served.gpu), load_model(served.model)


@lru_cache(maxsize=256)
def _build_sizer(
    served: ServedModel, hardware: HardwareProfile, model: ModelProfile, lengths: tuple[RequestLength, ...]
) -> PoolSizer:
    pairs, repeats = [(each.prompt, each.output) for each in lengths], [each.requests for each in lengths]
    mix = build_request_mix(1.0, pairs, repeats=repeats)
    return PoolSizer(mix, _build_cached_replica(served, hardware, model), get_objective(served))


@lru_cache(maxsize=256)
def _build_cached_replica(served: ServedModel, hardware: HardwareProfile, model: ModelProfile) -> ReplicaModel:
    return build_replica(served, hardware, model)[0]


def _size(sizer: PoolSizer, rate_per_s: float, arrival_scv: float) -> Capacity | None:
    """Return the pool for a rate; None without requests."""
    if rate_per_s <= 0:
        return None
    return _size_step(sizer, _find_step(rate_per_s, RATE_STEP), _find_step(arrival_scv, SCV_STEP))


@lru_cache(maxsize=16_384)
def _size_step(sizer: PoolSizer, rate_step: int, scv_step: int) -> Capacity:
    return sizer.size((1 + RATE_STEP) ** rate_step, (1 + SCV_STEP) ** scv_step)


def _find_step(value: float, step: float) -> int:
    """Return the power of 1 + `step` to which a value is rounded up."""
    return ceil(log(value) / log1p(step) - 1e-9)
