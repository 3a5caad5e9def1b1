"""Pools and nodes, as the service tells of them, drawn for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import number
from scheduler.cli.output import columns

if TYPE_CHECKING:
    from rich.console import RenderableType

Json = Mapping[str, Any]


def pool_rows(pools: Iterable[Json]) -> RenderableType:
    return columns(
        (
            [
                pool["name"],
                pool["kind"],
                str(pool["nodes"]),
                _capacity_text(pool),
                _demand_text(pool.get("demand")),
                str(pool["lent_nodes"]) if "lent_nodes" in pool else "-",
                _lending_text(pool.get("lending")),
            ]
            for pool in pools
        ),
        heads=["pool", "kind", "nodes", "GPUs", "demand", "lent", "lending"],
        right=["nodes", "GPUs", "demand", "lent"],
        empty="There are no pools.",
    )


def node_rows(nodes: Iterable[Json]) -> RenderableType:
    return columns(
        (
            [node["name"], node["pool"], f"{node['gpus']} x {node['gpu']}", state_text(node), users_text(node)]
            for node in nodes
        ),
        heads=["node", "home", "GPUs", "state", "used by"],
        empty="There are no nodes.",
    )


def state_text(node: Json) -> str:
    """`up`, `up, cordoned`, `up, loan recalled` ..."""
    words = [node["state"]]
    if node["draining"]:
        words.append("draining")
    elif node["cordoned"]:
        words.append("cordoned")
    if node["loan"]:
        words.append(f"loan {node['loan']['state']}")
    return ", ".join(words)


def users_text(node: Json) -> str:
    """`inference 2, job-a 4`, in GPUs."""
    users = [f"inference {node['inference_gpus']}"] if node["inference_gpus"] else []
    users += [f"{job_id} {len(indices)}" for job_id, indices in node["jobs"].items()]
    return ", ".join(users) or "nobody"


def _capacity_text(pool: Json) -> str:
    up, of = pool["capacity_gpus"], pool["gpus"]
    return str(of) if up == of else f"{up} of {of} up"


def _demand_text(demand: Json | None) -> str:
    if demand is None:
        return "-"
    shown = number(demand["gpus"], 1)
    return f"{shown} (asked {number(demand['asked_gpus'], 1)})" if demand["clamped"] else shown


def _lending_text(lending: Json | None) -> str:
    if lending is None:
        return "-"
    return f"at quantile {lending['quantile']:g}" if lending["enabled"] else "off"
