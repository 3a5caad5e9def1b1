"""Fleet commands (`pools`, `nodes`, `cordon`, `drain`, `uncordon`, `loans`, `top`) and their tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.jobs import render_jobs
from cli.completion import complete_node_names, complete_pool_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import has_no_subcommand, parse_gpu_indices, raise_input_error, read_yaml_object
from cli.output import (
    IntervalOption,
    OutputFormat,
    OutputOption,
    format_number,
    format_time,
    make_console,
    print_document,
    refresh_view,
    render_facts,
    render_table,
    require_table,
    stack,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ebbtide.client import Client


pools_app = typer.Typer(name="pools", help="List, create, change or delete pools.")
nodes_app = typer.Typer(name="nodes", help="List, add, change or delete nodes.")

PoolArgument = Annotated[
    str, typer.Argument(metavar="POOL", autocompletion=complete_pool_names, help="Name of a pool.")
]
NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", autocompletion=complete_node_names, help="Name of a node.")
]
KindOption = Annotated[
    str, typer.Option("--kind", help="training: runs jobs. inference: serves requests and can lend nodes.")
]
LendingOption = Annotated[
    str | None,
    typer.Option("--lending", metavar="LENDING.yaml", help="Lending policy of an inference pool; - reads stdin."),
]
LendingChange = Annotated[
    str,
    typer.Option("--lending", metavar="LENDING.yaml", help="Fields of the lending policy to change; - reads stdin."),
]
HomePoolOption = Annotated[
    str, typer.Option("--pool", autocompletion=complete_pool_names, help="Existing pool that owns the node.")
]
PoolFilterOption = Annotated[
    str, typer.Option("--pool", autocompletion=complete_pool_names, help="Show only nodes of this pool.")
]
GpuOption = Annotated[str, typer.Option("--gpu", help="Profile name of the hardware, such as h100-80g.")]
GpuCountOption = Annotated[int, typer.Option("--gpus", help="How many GPUs of this model the node has.")]
GpuMemoryOption = Annotated[
    str | None, typer.Option("--memory", help="Memory per GPU, such as 80GB. Default: that of the model.")
]


LendableOption = Annotated[
    bool, typer.Option("--lendable/--no-lendable", help="Whether a node of an inference pool can be lent.")
]
LendableChange = Annotated[
    bool | None,
    typer.Option("--lendable/--no-lendable", help="Whether the node can be lent. A lent node is recalled otherwise."),
]
LendableGpusOption = Annotated[
    str | None,
    typer.Option(
        "--lendable-gpus",
        metavar="GPUS",
        help="GPUs that a loan takes while inference serves from the others, such as 4-7 or 0,2. all: the whole node.",
    ),
]


@pools_app.callback(invoke_without_command=True)
def pools(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_pools(url, output)


@pools_app.command("list")
def list_pools(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List pools with their nodes, GPUs, demand and loans."""
    with service_client(url) as client:
        result = client.pools()
    print_document(result, output, lambda: render_pools(result))


@pools_app.command("create")
def create_pool(
    name: PoolArgument,
    kind: KindOption,
    lending: LendingOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Create a training or an inference pool."""
    document: dict[str, Any] = {"name": name, "kind": kind}
    if lending:
        document["lending"] = read_yaml_object(lending)
    with service_client(url) as client:
        response = client.create_pool(document)
    print_document(response, output, lambda: render_facts({"pool": f"{name} created"}))


@pools_app.command("change")
def change_pool(
    name: PoolArgument,
    lending: LendingChange,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Change fields of a pool's lending policy. Fields that the file omits stay as they are."""
    with service_client(url) as client:
        response = client.change_pool(name, {"lending": read_yaml_object(lending)})
    print_document(response, output, lambda: render_facts({"pool": f"{name} changed"}))


@pools_app.command("delete")
def delete_pool(name: PoolArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Delete a pool that has no nodes."""
    with service_client(url) as client:
        response = client.delete_pool(name)
    print_document(response, output, lambda: render_facts({"pool": f"{name} deleted"}))


@nodes_app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    pool: PoolFilterOption = "",
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    if has_no_subcommand(context):
        list_nodes(pool, url, output)


@nodes_app.command("list")
def list_nodes(
    pool: PoolFilterOption = "", url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """List nodes with their pool, GPUs, state and jobs."""
    with service_client(url) as client:
        result = client.nodes(pool=pool)
    print_document(result, output, lambda: render_nodes(result))


@nodes_app.command("add")
def add_node(
    name: NodeArgument,
    pool: HomePoolOption,
    gpu: GpuOption,
    gpus: GpuCountOption,
    memory: GpuMemoryOption = None,
    *,
    lendable: LendableOption = True,
    lendable_gpus: LendableGpusOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Add a node to a pool."""
    document: dict[str, Any] = {"name": name, "pool": pool, "gpu": gpu, "gpus": gpus}
    if memory is not None:
        document["memory"] = memory
    if not lendable:
        document["lendable"] = False
    if lendable_gpus is not None:
        document["lendable_gpus"] = parse_gpu_indices("--lendable-gpus", lendable_gpus)
    with service_client(url) as client:
        response = client.add_node(document)
    print_document(response, output, lambda: render_facts({"node": f"{name} added to pool {pool}"}))


@nodes_app.command("change")
def change_node(
    name: NodeArgument,
    lendable: LendableChange = None,
    lendable_gpus: LendableGpusOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Set whether a node can be lent, and which of its GPUs."""
    if lendable is None and lendable_gpus is None:
        raise_input_error("Missing option '--lendable', '--no-lendable' or '--lendable-gpus'. Set at least one.")
    indices = None if lendable_gpus is None else parse_gpu_indices("--lendable-gpus", lendable_gpus)
    with service_client(url) as client:
        response = client.change_node(name, lendable=lendable, lendable_gpus=indices)
    print_document(response, output, lambda: render_facts({"node": f"{name} {_describe_lending_of_node(response)}"}))


def _describe_lending_of_node(node: FleetJson) -> str:
    if not node["lendable"]:
        return "is not lent; a loan of it is recalled"
    if indices := node["lendable_gpus"]:
        return f"can be lent: {len(indices)} of its {node['gpus']} GPUs"
    return "can be lent"


@nodes_app.command("delete")
def delete_node(name: NodeArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Delete a node that is not in use."""
    with service_client(url) as client:
        response = client.delete_node(name)
    print_document(response, output, lambda: render_facts({"node": f"{name} deleted"}))


def cordon(node: NodeArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Mark a node as unschedulable. Its jobs keep running."""
    with service_client(url) as client:
        response = client.cordon(node)
    print_document(response, output, lambda: render_facts({"node": f"{node} cordoned"}))


def drain(node: NodeArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Cordon a node and move its jobs to other nodes."""
    with service_client(url) as client:
        response = client.drain(node)
    print_document(response, output, lambda: render_facts({"node": f"{node} cordoned; moving its jobs to other nodes"}))


def uncordon(node: NodeArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Mark a node as schedulable. This also releases a quarantined node."""
    with service_client(url) as client:
        response = client.uncordon(node)
    print_document(response, output, lambda: render_facts({"node": f"{node} uncordoned"}))


LoanStateOption = Annotated[str, typer.Option("--state", help="Show only loans in this state.")]


def loans(state: LoanStateOption = "", url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List lent inference nodes and their deadlines."""
    with service_client(url) as client:
        rows = client.loans(state=state)
    print_document(rows, output, lambda: render_loans(rows))


def render_loans(loans: Iterable[Mapping[str, Any]]) -> RenderableType:
    return render_table(
        (
            [
                loan["id"],
                loan["node"],
                loan["pool"],
                loan["state"],
                _format_loan_gpus(loan),
                format_time(loan["offered_at_s"]),
                _format_deadline(loan),
            ]
            for loan in loans
        ),
        headers=["loan", "lent node", "pool", "state", "GPUs", "offered (UTC)", "return by (UTC)"],
        empty="No node is lent.",
    )


def _format_loan_gpus(loan: Mapping[str, Any]) -> str:
    """Format the GPUs of a loan: `8`, or `4 of 8` if it takes a part of its node."""
    if loan["indices"] and loan["node_gpus"]:
        return f"{loan['gpus']} of {loan['node_gpus']}"
    return str(loan["gpus"]) if loan["gpus"] else "-"


def _format_deadline(loan: Mapping[str, Any]) -> str:
    deadline = loan.get("return_by_s")
    return format_time(deadline) if deadline is not None else "-"


WatchOrOnceOption = Annotated[
    bool | None,
    typer.Option(
        "--watch/--once", "-w/-1", help="Refresh until Ctrl-C, or print once. Default: refresh on a terminal."
    ),
]


def top(
    watch: WatchOrOnceOption = None,
    every: IntervalOption = 2.0,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show pools, loans and live jobs on one screen. Refreshes on a terminal."""
    require_table(output, bool(watch))
    refreshes = output is OutputFormat.TABLE and make_console().is_terminal if watch is None else watch
    with service_client(url) as client:
        if not refreshes:
            overview = _fetch_overview(client)
            print_document(overview, output, lambda: _render_overview(overview))
            return
        refresh_view(lambda: _render_overview(_fetch_overview(client)), every)


def _fetch_overview(client: Client) -> dict[str, Any]:
    return {
        "at_s": time.time(),
        "pools": client.pools(),
        "loans": [loan for loan in client.loans() if loan["is_live"]],
        "jobs": list(client.jobs(state="live")),
    }


def _render_overview(overview: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    head = Text(f"Ebbtide at {format_time(overview['at_s'])} UTC", style="bold")
    return stack(
        head,
        Text(),
        render_pools(overview["pools"]),
        Text(),
        render_loans(overview["loans"]),
        Text(),
        render_jobs(overview["jobs"]),
    )


FleetJson = Mapping[str, Any]


def render_pools(pools: Iterable[FleetJson]) -> RenderableType:
    return render_table(
        (
            [
                pool["name"],
                pool["kind"],
                str(pool["nodes"]),
                _format_capacity(pool),
                _format_demand(pool.get("demand")),
                str(pool["lent_nodes"]) if "lent_nodes" in pool else "-",
                _format_lending(pool.get("lending")),
            ]
            for pool in pools
        ),
        headers=["pool", "kind", "nodes", "GPUs", "demand", "lent", "lending"],
        right_aligned=["nodes", "GPUs", "demand", "lent"],
        empty="There are no pools.",
    )


def render_nodes(nodes: Iterable[FleetJson]) -> RenderableType:
    return render_table(
        (
            [
                node["name"],
                node["pool"],
                f"{node['gpus']} x {node['gpu']}{' (estimated)' if node['estimated'] else ''}",
                format_node_state(node),
                format_node_users(node),
            ]
            for node in nodes
        ),
        headers=["node", "pool", "GPUs", "state", "used by"],
        empty="There are no nodes.",
    )


_STANDBY_WORDS = {
    "asleep": "replicas idle",
    "absent": "no standby replica",
    "sleep_failed": "replica did not become idle",
    "wake_failed": "replica did not serve again",
}


def format_node_state(node: FleetJson) -> str:
    """Format a node's state: `up, cordoned`, `up, not lendable`, `up, loan active of 4 GPUs`, `up, replicas idle`."""
    words = [node["state"]]
    if node["quarantine"]:
        words.append("quarantined")
    elif node["draining"]:
        words.append("draining")
    elif node["cordoned"]:
        words.append("cordoned")
    if not node["lendable"]:
        words.append("not lendable")
    if node["loan"]:
        part = f" of {node['loan']['gpus']} GPUs" if node["loan"]["indices"] else ""
        words.append(f"loan {node['loan']['state']}{part}")
    elif node["lendable"] and node["lendable_gpus"]:
        words.append(f"{len(node['lendable_gpus'])} GPUs lendable")
    if (standby := node.get("standby")) and standby["phase"] in _STANDBY_WORDS:
        words.append(_STANDBY_WORDS[standby["phase"]])
    return ", ".join(words)


def format_node_users(node: FleetJson) -> str:
    """Format the GPUs in use: `inference 2, job-a 4`."""
    users = [f"inference {node['inference_gpus']}"] if node["inference_gpus"] else []
    users += [f"{job_id} {len(indices)}" for job_id, indices in node["jobs"].items()]
    return ", ".join(users) or "-"


def _format_capacity(pool: FleetJson) -> str:
    available, total = pool["capacity_gpus"], pool["gpus"]
    return str(total) if available == total else f"{available} of {total} up"


def _format_demand(demand: FleetJson | None) -> str:
    if demand is None:
        return "-"
    shown = format_number(demand["gpus"], 1)
    return f"{shown} (reported {format_number(demand['asked_gpus'], 1)})" if demand["clamped"] else shown


def _format_lending(lending: FleetJson | None) -> str:
    if lending is None:
        return "-"
    if not lending["enabled"]:
        return "off"
    if lending["mode"] == "shadow":
        return "shadow"
    if lending["shortage_target"] is None:
        return f"at quantile {lending['quantile']:g}"
    return f"short at most {lending['shortage_target']:.3%} of the time"
