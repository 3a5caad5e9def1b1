"""`ebbtide explain pool`: why a pool lends nothing, or nothing more."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cli.connection import service_client
from cli.output import OutputFormat, format_duration, format_number, format_time, print_document, render_facts

if TYPE_CHECKING:
    from rich.console import RenderableType


def explain_pool(name: str, url: str, output: OutputFormat) -> None:
    """Print the explanation of a pool."""
    with service_client(url) as client:
        result = client.pool_explanation(name)
    print_document(result, output, lambda: render_pool_explanation(result))


def render_pool_explanation(found: Mapping[str, Any]) -> RenderableType:
    """Return the obstacle to a new loan, its lever, and the numbers by which the pool lends."""
    return render_facts(dict(_list_facts(found)))


def _list_facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "pool", found["pool"]
    yield "no more loans", f"{found['code']}: {found['summary']}"
    yield "to change it", found["lever"]
    yield "demand", _describe_demand(found)
    yield "forecast", _describe_forecast(found)
    yield (
        "capacity",
        (
            f"{found['capacity_gpus']} GPUs, {format_number(found['headroom_gpus'], 1)} of them headroom, "
            f"{found['cordoned_gpus']} on cordoned nodes"
        ),
    )
    yield "nodes", _describe_nodes(found)
    yield "GPUs", f"{found['lent_gpus']} lent of {found['lasting_gpus']} that it can lend"
    for gpu, wanted in found["wanted"].items():
        yield f"wanted {gpu}", f"{format_number(wanted['gpus'], 1)} GPUs, by {wanted['jobs']} jobs"
    wait_s = max(0.0, found["next_full_pass_at_s"] - time.time())
    yield "next full pass", f"in {format_duration(wait_s)}, at {format_time(found['next_full_pass_at_s'])} UTC"
    if found["budget_left"] is not None:
        yield "shortage budget", f"{found['budget_left']:.0%} left"
    yield "switches", _describe_switches(found["switches"])
    if found["shadow"] is not None:
        yield "shadow", describe_shadow(found["shadow"])


def _describe_demand(found: Mapping[str, Any]) -> str:
    if found["observed_gpus"] is None:
        return "no reading"
    observed, age = format_number(found["observed_gpus"], 1), format_duration(found["demand_age_s"])
    return f"{observed} GPUs, {age} ago; stale after {format_duration(found['stale_after_s'])}"


def _describe_forecast(found: Mapping[str, Any]) -> str:
    if found["forecast_gpus"] is None:
        return "none"
    state = "" if found["is_calibrated"] else ", not calibrated"
    return f"{format_number(found['forecast_gpus'], 1)} GPUs at quantile {found['quantile']:g}{state}"


def _describe_nodes(found: Mapping[str, Any]) -> str:
    limit = "" if found["lent_nodes_max"] is None else f", at most {found['lent_nodes_max']}"
    blocked = found["standby_blocked_nodes"]
    sleep = f", {blocked} without a replica that can sleep" if blocked else ""
    sleep += f", {used} with lendable GPUs in use" if (used := found["partly_used_nodes"]) else ""
    return (
        f"{found['lent_nodes']} lent of {found['lasting_nodes']} that it can lend{limit}; {found['proposed_nodes']} "
        f"proposed, {found['kept_nodes_min']} always kept, {found['cordoned_nodes']} cordoned, "
        f"{found['vetoed_nodes']} vetoed{sleep}"
    )


def _describe_switches(switches: Mapping[str, Any]) -> str:
    state = "lending is on"
    if switches["lending_paused"]:
        state = "all loans are recalled" if switches["loans_recalled"] else "lending is paused"
    if switches["set_at_s"] is None:
        return state
    return f"{state}, set by {switches['set_by'] or 'an unnamed caller'} at {format_time(switches['set_at_s'])} UTC"


def describe_shadow(shadow: Mapping[str, Any]) -> str:
    """Return what a pool in shadow mode would have lent since it entered this mode."""
    days = max(0.0, time.time() - shadow["since_s"]) / 86_400.0
    return (
        f"in {days:.1f} days it would have lent {shadow['gpu_hours']:,.0f} GPU-hours in {shadow['loans']} loans, "
        f"{shadow['recalls']} of them recalled, with {shadow['short_intervals']:,} of {shadow['intervals']:,} "
        f"intervals short; {len(shadow['nodes'])} nodes now"
    )
