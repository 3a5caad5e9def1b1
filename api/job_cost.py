"""Cost of one job: GPU time on own and lent nodes by generation, with amounts at the set prices.

GPU time comes from the allocation spans of the job, and amounts from the function of `/v1/savings`. So the jobs of a
queue add up to the amounts of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import ContextDep, JobIdPath, ServiceDep, create_router
from api.http.paging import JobId
from api.identity.authorization import VIEWER, requires
from api.savings import find_unpriced, price_usage
from api.usage import usage_sums
from scheduler.domain.job import Job
from scheduler.domain.job_queue import UsageEntry, UsageKey
from scheduler.store.allocation_history import GenerationUse

_GPU_S_MIN = 1.0
"""Differences below a GPU-second are remainders of sums of real numbers."""
_TIME = "in seconds since 1970 (UTC)"


class JobAmountsView(TypedDict):
    """GPU-hours times prices, in the currency of the response. GPU models without a price count as nothing."""

    used: Annotated[float, Field(description="Amount of the GPU time that the job held, on all nodes.")]
    on_loan: Annotated[float, Field(description="Part of `used` that was on nodes on loan from inference pools.")]


class JobGpuTimeView(TypedDict):
    """GPU time that the job held. `gpu_s` = `own_gpu_s` + `lent_gpu_s`."""

    gpu_s: Annotated[float, Field(description="GPU-seconds held on all nodes.")]
    own_gpu_s: Annotated[float, Field(description="GPU-seconds held on nodes of training pools.")]
    lent_gpu_s: Annotated[float, Field(description="GPU-seconds held on nodes on loan from inference pools.")]
    amounts: Annotated[JobAmountsView | None, Field(description="Amounts at the set prices. Null: no prices are set.")]


class GenerationCostView(JobGpuTimeView):
    """GPU time of one generation: from one change of the job's GPUs or plan to the next."""

    generation: Annotated[int, Field(description="Incremented with each change of the job's GPUs or plan.")]
    begin_s: Annotated[float, Field(description=f"When it received its first GPUs, {_TIME}.")]
    end_s: Annotated[float | None, Field(description=f"When it held none any more, {_TIME}. Null: it holds GPUs.")]
    gpus: Annotated[list[str], Field(description="GPU models that it held, by name.")]


class JobCostView(JobGpuTimeView):
    """Cost of a job so far."""

    job_id: JobId
    as_of_s: Annotated[float, Field(description=f"Time up to which a running job is counted, {_TIME}.")]
    currency: Annotated[str | None, Field(description="Currency of all amounts, such as USD. Null: no prices are set.")]
    unpriced: Annotated[list[str], Field(description="GPU models that the job held and that have no price, by name.")]
    held_gpu_s: Annotated[
        float, Field(description="GPU-seconds that the job held in total: `gpu_s` and `unrecorded_gpu_s`.")
    ]
    unrecorded_gpu_s: Annotated[
        float,
        Field(
            description="GPU-seconds that the job held beyond `gpu_s`, in allocations that were not recorded or are no "
            "longer retained. Their nodes and amounts are not known."
        ),
    ]
    generations: Annotated[list[GenerationCostView], Field(description="One entry per generation, in order.")]


def job_cost_view(
    job: Job, uses: Sequence[GenerationUse], prices: Mapping[str, float], *, currency: str, now_s: float
) -> JobCostView:
    """Return the cost of the job.

    Args:
        uses: what its generations held until `now_s`, in order of the generation.
    """
    entries = _usage_entries(job, uses)
    held_gpu_s = job.account.gpu_s + max(0.0, now_s - job.account.settled_at_s) * job.allocation.held_gpus
    sums = _gpu_time_view(entries, prices)
    unrecorded_gpu_s = held_gpu_s - sums["gpu_s"]
    return {
        **sums,
        "job_id": job.id,
        "as_of_s": now_s,
        "currency": currency if prices else None,
        "unpriced": find_unpriced(entries, prices),
        "held_gpu_s": held_gpu_s,
        "unrecorded_gpu_s": unrecorded_gpu_s if unrecorded_gpu_s >= _GPU_S_MIN else 0.0,
        "generations": [
            _generation_view(job, generation, tuple(group), prices)
            for generation, group in groupby(uses, attrgetter("generation"))
        ],
    }


def _generation_view(
    job: Job, generation: int, uses: Sequence[GenerationUse], prices: Mapping[str, float]
) -> GenerationCostView:
    ends_s = [use.end_s for use in uses if use.end_s is not None]
    return {
        **_gpu_time_view(_usage_entries(job, uses), prices),
        "generation": generation,
        "begin_s": min(use.begin_s for use in uses),
        "end_s": max(ends_s) if len(ends_s) == len(uses) else None,
        "gpus": sorted({use.gpu for use in uses}),
    }


def _gpu_time_view(entries: Sequence[UsageEntry], prices: Mapping[str, float]) -> JobGpuTimeView:
    sums, amounts = usage_sums(entries), price_usage(entries, prices)
    return {
        "gpu_s": sums["gpu_s"],
        "own_gpu_s": sums["own_gpu_s"],
        "lent_gpu_s": sums["lent_gpu_s"],
        "amounts": {"used": amounts.used, "on_loan": amounts.on_loan} if prices else None,
    }


def _usage_entries(job: Job, uses: Iterable[GenerationUse]) -> list[UsageEntry]:
    """Return the uses as usage of the job's queue and owner, which has no hour here."""
    spec = job.spec
    return [
        UsageEntry(UsageKey(0, spec.queue, job.owner_key, use.gpu, use.is_lent, spec.model_label), use.gpu_s)
        for use in uses
    ]


router = create_router("jobs")


@router.get("/jobs/{job_id}/cost")
@requires(VIEWER)
def get_job_cost(job_id: JobIdPath, context: ContextDep, service: ServiceDep) -> JobCostView:
    """Return the GPU time of the job on own and lent nodes, by generation, times the prices of EBBTIDE_GPU_PRICES.
    Also for ended jobs."""
    job = context.job(job_id)
    now_s = max(context.now_s, context.snapshot.now_s)
    uses = context.store.allocations.sum_generations(job_id, now_s=now_s)
    return job_cost_view(job, uses, dict(service.settings.gpu_prices), currency=service.settings.currency, now_s=now_s)
