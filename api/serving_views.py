"""Views of the models that a pool serves: their requests, replicas, and the replicas proposed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from scheduler.domain.fleet import DemandReading, Pool
from scheduler.domain.replica_advice import ReplicaAdvice
from scheduler.domain.serving import LengthSummary, ModelLoad, ServedModel, SizingMode


class LengthSummaryView(TypedDict):
    """Lengths of requests in tokens."""

    prompt_mean: Annotated[float, Field(description="Average length of their prompts.")]
    prompt_p95: Annotated[float, Field(description="Length that 95% of their prompts do not exceed.")]
    output_mean: Annotated[float, Field(description="Average number of tokens that they generate.")]
    output_p95: Annotated[float, Field(description="Number of generated tokens that 95% of them do not exceed.")]


class ModelLoadView(TypedDict):
    """Requests for a model at the latest reading, and the replicas that meet its objective."""

    rate_per_s: Annotated[float, Field(description="Requests per second.")]
    burstiness: Annotated[float, Field(description="Squared coefficient of variation of the times between requests.")]
    replicas: Annotated[int, Field(description="Number of replicas that meet the objective at this rate.")]
    gpus: Annotated[int, Field(description="Number of GPUs of these replicas.")]
    ttft_s: Annotated[float, Field(description="Expected time to first token at the percentile, in seconds.")]
    tpot_s: Annotated[float, Field(description="Expected time per output token at the percentile, in seconds.")]
    utilization: Annotated[float, Field(description="Part of the time that requests add to iterations, 0 to 1.")]
    binding: Annotated[
        str,
        Field(
            description="Limit that one replica less would exceed: `ttft`, `tpot`, `kv_cache`, `sequences`, "
            "`throughput`, or `none`."
        ),
    ]
    ahead_rate_per_s: Annotated[
        float, Field(description="Largest rate expected until a replica that starts now serves, in requests/s.")
    ]
    ahead_replicas: Annotated[int, Field(description="Number of replicas for that rate.")]
    lengths: Annotated[
        LengthSummaryView | None, Field(description="Lengths of the requests. Null: recorded by an earlier release.")
    ]


class ReplicaAdviceView(TypedDict):
    """Replicas that are proposed for a model."""

    replicas: Annotated[int, Field(description="Proposed number of replicas.")]
    gpus: Annotated[int, Field(description="Number of GPUs of these replicas.")]
    since_s: Annotated[float, Field(description="Time of its last change, in seconds since 1970 (UTC).")]


class ServedModelView(TypedDict):
    """A model that an inference pool serves."""

    model: Annotated[str, Field(description="Name by which its requests are reported.")]
    gpu: Annotated[str, Field(description="Profile name of the GPUs of its replicas.")]
    gpus_per_replica: Annotated[int, Field(description="Number of GPUs of one replica.")]
    ttft_s: Annotated[float, Field(description="Bound of the objective on the time to first token, in seconds.")]
    tpot_s: Annotated[float, Field(description="Bound of the objective on the time per output token, in seconds.")]
    percentile: Annotated[float, Field(description="Share of requests that meets each bound.")]
    sizing: Annotated[SizingMode, Field(description="Whether replicas are proposed, and set on Kubernetes.")]
    load: Annotated[ModelLoadView | None, Field(description="Requests at the latest reading. Null: none reported.")]
    advice: Annotated[ReplicaAdviceView | None, Field(description="Proposed replicas. Null: none are proposed.")]


class PoolServingView(TypedDict):
    """The documents of the models that a pool serves."""

    pool: Annotated[str, Field(description="Name of the inference pool.")]
    models: Annotated[
        list[dict[str, object]], Field(description="Documents of `ebbtide serving size`, with lengths and sizing.")
    ]


def served_model_views(pool: Pool, reading: DemandReading | None) -> list[ServedModelView]:
    loads = {} if reading is None else {each.model: each for each in reading.loads}
    advice = {} if reading is None else {each.model: each for each in reading.advice}
    return [_model_view(each, loads.get(each.model), advice.get(each.model)) for each in pool.serving]


def _model_view(served: ServedModel, load: ModelLoad | None, advice: ReplicaAdvice | None) -> ServedModelView:
    if served.sizing.mode is SizingMode.OFF:
        advice = None
    return {
        "model": served.model,
        "gpu": served.gpu,
        "gpus_per_replica": served.tensor_degree,
        "ttft_s": served.ttft_s,
        "tpot_s": served.tpot_s,
        "percentile": served.percentile,
        "sizing": served.sizing.mode,
        "load": None if load is None else _load_view(load),
        "advice": None if advice is None else _advice_view(advice, served.tensor_degree),
    }


def _load_view(load: ModelLoad) -> ModelLoadView:
    return {
        "rate_per_s": load.rate_per_s,
        "burstiness": load.arrival_scv,
        "replicas": load.replicas,
        "gpus": load.replicas * load.gpus,
        "ttft_s": load.ttft_s,
        "tpot_s": load.tpot_s,
        "utilization": load.utilization,
        "binding": load.binding,
        "ahead_rate_per_s": load.ahead_rate_per_s,
        "ahead_replicas": load.ahead_replicas,
        "lengths": None if load.lengths is None else _lengths_view(load.lengths),
    }


def _lengths_view(lengths: LengthSummary) -> LengthSummaryView:
    return {
        "prompt_mean": lengths.prompt_mean,
        "prompt_p95": lengths.prompt_p95,
        "output_mean": lengths.output_mean,
        "output_p95": lengths.output_p95,
    }


def _advice_view(advice: ReplicaAdvice, gpus_per_replica: int) -> ReplicaAdviceView:
    return {"replicas": advice.replicas, "gpus": advice.replicas * gpus_per_replica, "since_s": advice.since_s}
