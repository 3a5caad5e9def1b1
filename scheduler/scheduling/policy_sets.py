"""Policy sets: complete scheduling disciplines by name. They keep no state between ticks.

A set composes policies and a mechanism that assigns GPUs. A new discipline needs no change to the stages or to
`decide`. You can add a policy set without changing this file: an entry point of the group `ebbtide.policies` names a
function that takes PolicySettings and returns a PolicySet. The name of the entry point is the name of the set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from scheduler.domain.suggestions import suggest
from scheduler.scheduling.policies.backfill import reserve_earliest_start
from scheduler.scheduling.policies.elastic_deadline import earliest_deadline_first, elastic_deadline_shares
from scheduler.scheduling.policies.elastic_share import elastic_shares
from scheduler.scheduling.policies.job_order import (
    always_block_queue,
    least_attained_service,
    least_service,
    shortest_job_first,
    shortest_remaining,
    shortest_remaining_service,
    shortest_remaining_time,
)
from scheduler.scheduling.policies.lending import lend_forecast_idle, lend_nothing
from scheduler.scheduling.policies.lyra import least_linear_gain_first, least_node_fraction, linear_counts
from scheduler.scheduling.policies.model_mix import deal_nodes
from scheduler.scheduling.policies.placement import owned_first
from scheduler.scheduling.policies.preemption import find_preemption_victims
from scheduler.scheduling.policies.scaling import estimate_arrivals, flexible_counts
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import efficient_gpus
from scheduler.scheduling.policies.stage_policies import StagePolicies
from scheduler.scheduling.policies.whole_nodes import count_required_whole_nodes
from scheduler.scheduling.stages.assignment import AssignByAllotment, AssignGpus, assign_by_queue

ENTRY_POINTS = "ebbtide.policies"


@dataclass(frozen=True, slots=True)
class PolicySet(StagePolicies):
    """One scheduling discipline: its policies, and the mechanism that calls most of them.

    Attributes:
        paper: where the discipline was published.
        assign_gpus: starts pending jobs and moves GPUs between jobs.
    """

    name: str
    summary: str
    paper: str
    assign_gpus: AssignGpus = assign_by_queue


_DEFAULT = PolicySet(
    name="ebbtide",
    summary="least service first, then GPUs where scaling curves end jobs soonest",
    paper="ours, ARCHITECTURE.md",
    order=least_service,
    starting_gpus=efficient_gpus,
    count_whole_nodes=count_required_whole_nodes,
    backfill=reserve_earliest_start,
    find_eviction_victims=find_preemption_victims,
    lend=lend_forecast_idle,
    scale=flexible_counts,
    expected_arrivals=estimate_arrivals,
    place=owned_first,
    deal_nodes=deal_nodes,
)

_POLICY_SETS = (
    PolicySet(
        name="fifo",
        summary="strictly first come, first served",
        paper="baseline of Lyra, EuroSys'23",
        blocks_queue=always_block_queue,
    ),
    PolicySet(
        name="sjf",
        summary="shortest run time first",
        paper="Smith 1956 (NRL)",
        order=shortest_job_first,
    ),
    PolicySet(
        name="srtf",
        summary="shortest remaining time first, preempts",
        paper="Schrage 1968 (OR)",
        assign_gpus=AssignByAllotment(shortest_remaining_time),
    ),
    PolicySet(
        name="srsf",
        summary="shortest remaining time x GPUs first, preempts",
        paper="Tiresias, NSDI'19",
        assign_gpus=AssignByAllotment(shortest_remaining_service),
    ),
    PolicySet(
        name="las",
        summary="least attained time x GPUs first, preempts",
        paper="Tiresias, NSDI'19",
        assign_gpus=AssignByAllotment(least_attained_service),
    ),
    PolicySet(
        name="edf",
        summary="earliest deadline first, each as wide as it can, preempts",
        paper="baseline of ElasticFlow, ASPLOS'23",
        assign_gpus=AssignByAllotment(earliest_deadline_first),
        elastic_allotment=True,
        requires_speedup=False,
    ),
    PolicySet(
        name="elastic-deadline",
        summary="the least shares that meet the deadlines, preempts",
        paper="ElasticFlow, ASPLOS'23",
        assign_gpus=AssignByAllotment(elastic_deadline_shares),
        elastic_allotment=True,
    ),
    PolicySet(
        name="opportunistic",
        summary="first come first served, passing jobs that do not fit",
        paper="baseline of Lyra, EuroSys'23",
        lend=lend_forecast_idle,
    ),
    PolicySet(
        name="afs",
        summary="shortest bases first, then GPU by GPU to the greater gain, preempts",
        paper="AFS-L, NSDI'21",
        lend=lend_forecast_idle,
        assign_gpus=AssignByAllotment(elastic_shares),
        elastic_allotment=True,
    ),
    PolicySet(
        name="lyra",
        summary="shortest first, then GPUs by linear gains",
        paper="Lyra, EuroSys'23",
        order=shortest_remaining,
        lend=lend_forecast_idle,
        reclaim=least_node_fraction,
        scale=linear_counts,
        shrink=least_linear_gain_first,
    ),
    replace(_DEFAULT, name="ebbtide-loaning", summary="ebbtide without scaling", scale=None, deal_nodes=None),
    replace(_DEFAULT, name="ebbtide-scaling", summary="ebbtide without lending", lend=lend_nothing),
    _DEFAULT,
)
_BY_NAME = {policies.name: policies for policies in _POLICY_SETS}


def load_policy_set(name: str, settings: PolicySettings | None = None) -> PolicySet:
    """Return the named set: a built-in one, or one from an entry point.

    Raises:
        ValueError: there is no set of this name (the message lists all names), or its entry point fails.
    """
    settings, added = settings or PolicySettings(), [point for point in find_entry_points() if point.name == name]
    if name in _BY_NAME and not added:
        return replace(_BY_NAME[name], settings=settings)
    if not added:
        known = list_policy_sets()
        raise ValueError(f"policy set {name!r} is not known; allowed: {', '.join(known)}{suggest(name, known)}")
    if name in _BY_NAME or len(added) > 1:
        values = " and ".join(point.value for point in added)
        raise ValueError(
            f"{_describe_entry_point(added[0])}: the name is taken ({values}); choose one that no other policy set has"
        )
    return _load_entry_point(added[0], settings)


def list_policy_sets() -> tuple[str, ...]:
    """Return the names of the built-in sets, then of those from entry points."""
    return (*_BY_NAME, *sorted({point.name for point in find_entry_points()} - _BY_NAME.keys()))


@cache
def find_entry_points() -> tuple[EntryPoint, ...]:
    """Return the entry points. Cached, because the search opens a file of every installed package."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _load_entry_point(point: EntryPoint, settings: PolicySettings) -> PolicySet:
    """Call the function of an entry point. Any exception in it becomes a ValueError that names the entry point."""
    try:
        policies = point.load()(settings)
    except Exception as error:
        raise ValueError(f"{_describe_entry_point(point)}: {type(error).__name__}: {error}") from error
    if not isinstance(policies, PolicySet):
        raise ValueError(f"{_describe_entry_point(point)}: returned {type(policies).__name__}; allowed: a PolicySet")
    return replace(policies, name=point.name)


def _describe_entry_point(point: EntryPoint) -> str:
    return f"policy {point.name!r} of entry point {point.value!r} ({ENTRY_POINTS})"
