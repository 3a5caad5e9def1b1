"""Pools and nodes of a service."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from scheduler.cli.completing import node_names, pool_names
from scheduler.cli.failure import refuse
from scheduler.cli.fleet_view import node_rows, pool_rows
from scheduler.cli.inputs import yaml_of
from scheduler.cli.output import Format, OutputOption, emit, facts
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

pools_app = typer.Typer(name="pools", help="List, create or delete pools.")
nodes_app = typer.Typer(name="nodes", help="List, add or delete nodes.")

PoolArgument = Annotated[str, typer.Argument(metavar="POOL", autocompletion=pool_names, help="Name of a pool.")]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", autocompletion=node_names, help="Name of a node.")]
KindOption = Annotated[str, typer.Option("--kind", help="training or inference.")]
LendingOption = Annotated[
    str | None,
    typer.Option("--lending", metavar="LENDING.yaml", help="What an inference pool's owner allows; - is stdin."),
]
HomeOption = Annotated[str, typer.Option("--pool", autocompletion=pool_names, help="Pool that it belongs to.")]
OnlyPoolOption = Annotated[str, typer.Option("--pool", autocompletion=pool_names, help="Only nodes of this pool.")]
GpuOption = Annotated[str, typer.Option("--gpu", help="Model of its GPUs.")]
GpusOption = Annotated[int, typer.Option("--gpus", help="How many GPUs it has.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", help="Of one GPU, such as 80GB; else the model says it.")]


def is_list(context: typer.Context) -> bool:
    """A group alone lists. Its options would be lost on a verb after them, so that is refused."""
    if context.invoked_subcommand is None:
        return True
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            refuse(f"--{name}: give options after the verb: {context.command_path} {context.invoked_subcommand} ...")
    return False


@pools_app.callback(invoke_without_command=True)
def pools(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    if is_list(context):
        list_pools(url, output)


@pools_app.command("list")
def list_pools(url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """List the pools: nodes, GPUs, demand, loans."""
    with service(url) as client:
        found = client.pools()
    emit(found, output, lambda: pool_rows(found))


@pools_app.command("create")
def create_pool(
    name: PoolArgument,
    kind: KindOption,
    lending: LendingOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Create a pool of nodes of one purpose."""
    document: dict[str, Any] = {"name": name, "kind": kind}
    if lending:
        document["lending"] = yaml_of(lending)
    with service(url) as client:
        answer = client.create_pool(document)
    emit(answer, output, lambda: facts({"pool": f"{name} is created"}))


@pools_app.command("delete")
def delete_pool(name: PoolArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Delete a pool that has no nodes."""
    with service(url) as client:
        answer = client.delete_pool(name)
    emit(answer, output, lambda: facts({"pool": f"{name} is deleted"}))


@nodes_app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    pool: OnlyPoolOption = "",
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    if is_list(context):
        list_nodes(pool, url, output)


@nodes_app.command("list")
def list_nodes(pool: OnlyPoolOption = "", url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """List the nodes: home pool, GPUs, who uses them, loan."""
    with service(url) as client:
        found = client.nodes(pool=pool)
    emit(found, output, lambda: node_rows(found))


@nodes_app.command("add")
def add_node(
    name: NodeArgument,
    pool: HomeOption,
    gpu: GpuOption,
    gpus: GpusOption,
    memory: MemoryOption = None,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Add a node to its home pool."""
    document: dict[str, Any] = {"name": name, "pool": pool, "gpu": gpu, "gpus": gpus}
    if memory is not None:
        document["memory"] = memory
    with service(url) as client:
        answer = client.add_node(document)
    emit(answer, output, lambda: facts({"node": f"{name} is in pool {pool}"}))


@nodes_app.command("delete")
def delete_node(name: NodeArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Delete a node that nobody uses."""
    with service(url) as client:
        answer = client.delete_node(name)
    emit(answer, output, lambda: facts({"node": f"{name} is deleted"}))


def cordon(node: NodeArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Put nothing new on a node."""
    with service(url) as client:
        answer = client.cordon(node)
    emit(answer, output, lambda: facts({"node": f"{node} takes nothing new"}))


def drain(node: NodeArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Put nothing new on a node and move its jobs away."""
    with service(url) as client:
        answer = client.drain(node)
    emit(answer, output, lambda: facts({"node": f"{node} takes nothing new and its jobs are moved away"}))


def uncordon(node: NodeArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Let a node take work again."""
    with service(url) as client:
        answer = client.uncordon(node)
    emit(answer, output, lambda: facts({"node": f"{node} takes work again"}))
