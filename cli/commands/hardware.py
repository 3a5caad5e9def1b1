"""`ebbtide hardware`: shows, sets and deletes the GPU profiles of a service, and the networks of its pools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_gpu_names, complete_pool_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import has_no_subcommand, input_errors_from, raise_input_error, read_text
from cli.output import (
    OutputFormat,
    OutputOption,
    format_bytes,
    format_percent,
    format_time,
    print_document,
    render_facts,
    render_table,
    stack,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(name="hardware", help="List, show, set or delete GPU profiles, and networks of pools.")

GpuArgument = Annotated[
    str, typer.Argument(metavar="NAME", autocompletion=complete_gpu_names, help="Name of the GPU model.")
]
FileArgument = Annotated[
    str,
    typer.Argument(metavar="FILE", help="Profile in JSON or YAML, as `ebbtide profile` writes it; - reads stdin."),
]
PoolArgument = Annotated[
    str, typer.Argument(metavar="POOL", autocompletion=complete_pool_names, help="Name of a pool.")
]
BandwidthOption = Annotated[
    str,
    typer.Option("--bandwidth", metavar="SIZE", help="Achieved per second and direction on one port, such as 20GB."),
]
LatencyOption = Annotated[
    float, typer.Option("--latency", metavar="SECONDS", help="Start-up time of a message between nodes, such as 1e-5.")
]
NicsOption = Annotated[int, typer.Option("--nics", metavar="N", help="Network ports of a node that jobs use.")]


_SPEEDS = ("achieved", "intra GB/s", "inter GB/s")


@app.callback(invoke_without_command=True)
def hardware(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_hardware(url, output)


@app.command("list")
def list_hardware(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the GPU profiles from which the service computes plans, with their sources."""
    with service_client(url) as client:
        result = client.gpu_profiles()
    print_document(result, output, lambda: render_profiles(result))


@app.command("show")
def show_hardware(name: GpuArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show all figures of a GPU profile and where each comes from."""
    with service_client(url) as client:
        result = client.gpu_profile(name)
    print_document(result, output, lambda: render_profile(result))


@app.command("set")
def set_hardware(
    name: GpuArgument,
    file: FileArgument,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Set or replace a GPU profile (admins only). Plans are solved again."""
    profile = _read_profile(file)
    with service_client(url) as client:
        result = client.set_gpu_profile(name, profile)
    facts = {"GPU": name, "version": str(result["version"]), "nodes": str(result["nodes"])}
    print_document(result, output, lambda: render_facts(facts))


@app.command("manifest")
def print_manifest(file: FileArgument) -> None:
    """Print the GpuProfile for a profile, to apply with kubectl. Needs no service."""
    import yaml

    from scheduler.kubernetes.resources.gpu_profile import build_gpu_profile
    from scheduler.solver.profiles.catalog import parse_gpu

    profile = _read_profile(file)
    with input_errors_from(file):
        name = parse_gpu(json.dumps(profile)).gpu
    typer.echo(yaml.safe_dump(build_gpu_profile(name, profile), sort_keys=False, width=120), nl=False)


@app.command("delete")
def delete_hardware(name: GpuArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Delete a profile that was set (admins only). The shipped or estimated one counts again."""
    with service_client(url) as client:
        result = client.delete_gpu_profile(name)
    print_document(result, output, lambda: render_facts({"GPU": f"version {result['version']} of {name} deleted"}))


@app.command("set-network")
def set_network(
    pool: PoolArgument,
    bandwidth: BandwidthOption,
    latency: LatencyOption,
    nics: NicsOption = 1,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Set the network between the nodes of a pool (admins only). It replaces that of their GPU profile."""
    from scheduler.documents.units import parse_bytes

    with input_errors_from("--bandwidth"):
        document = {"bandwidth_bytes_per_s": float(parse_bytes(bandwidth)), "latency_s": latency, "nics_per_node": nics}
    with service_client(url) as client:
        result = client.set_pool_network(pool, document)
    print_document(result, output, lambda: render_facts({"pool": pool, "network": _describe_network(document)}))


@app.command("delete-network")
def delete_network(pool: PoolArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Return to the network of the GPU profiles for a pool (admins only)."""
    with service_client(url) as client:
        result = client.delete_pool_network(pool)
    print_document(result, output, lambda: render_facts({"pool": pool, "network": "that of the GPU profiles"}))


def render_profiles(profiles: Iterable[Mapping[str, Any]]) -> RenderableType:
    return render_table(
        (
            [
                each["name"],
                each["source"],
                "" if each["version"] is None else str(each["version"]),
                str(each["nodes"] or ""),
                format_bytes(each["memory_bytes"]),
                f"{each['peak_flops_per_s'] / 1e12:,.0f}",
                format_percent(each["efficiency"]),
                f"{each['intra_bandwidth_bytes_per_s'] / 1e9:,.1f}",
                f"{_bytes_per_s_per_gpu(each['network']) / 1e9:,.1f}",
                "profile" if each["network"]["of_profile"] else "pool",
            ]
            for each in profiles
        ),
        headers=["GPU", "source", "version", "nodes", "memory", "TFLOP/s", *_SPEEDS, "from"],
        right_aligned=["version", "nodes", "memory", "TFLOP/s", *_SPEEDS],
        empty="The service knows no GPU model.",
    )


def render_profile(view: Mapping[str, Any]) -> RenderableType:
    network = view["network"]
    facts = {
        "GPU": view["name"],
        "source": view["source"] if view["version"] is None else f"set, version {view['version']}",
        "set": "" if view["set_at_s"] is None else f"{format_time(view['set_at_s'])} by {view['set_by'] or 'unknown'}",
        "nodes": str(view["nodes"]),
        "network": f"{_describe_network(network)}{'' if network['of_profile'] else ', set for a pool'}",
    }
    return stack(
        render_facts({name: fact for name, fact in facts.items() if fact}),
        render_table(_list_figures(view["profile"]), headers=["field", "value", "unit", "source"], empty=""),
    )


def _list_figures(profile: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield field, value, unit and source of each figure. Measured collectives are counted only."""
    for name, entry in profile.items():
        figure = entry if isinstance(entry, Mapping) else {"value": entry}
        value, unit, source = (figure.get(key, "") for key in ("value", "unit", "source"))
        if name == "collectives" and isinstance(value, list):
            value = f"{len(value)} measured tables"
        text = ", ".join(map(str, value)) if isinstance(value, list) else _format_figure(value)
        yield [name, text, str(unit), str(source)]


def _format_figure(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _describe_network(network: Mapping[str, Any]) -> str:
    ports = f"{network['nics_per_node']} per node" if "nics_per_node" in network else _describe_sharing(network)
    return f"{network['bandwidth_bytes_per_s'] / 1e9:,.1f} GB/s per port, {ports}, {network['latency_s']:g} s"


def _describe_sharing(network: Mapping[str, Any]) -> str:
    return f"{network['gpus_per_nic']:g} GPUs per port"


def _bytes_per_s_per_gpu(network: Mapping[str, Any]) -> float:
    return float(network["bandwidth_bytes_per_s"] / network["gpus_per_nic"])


def _read_profile(file: str) -> dict[str, Any]:
    from scheduler.solver.profiles.gpu_files import parse_profile_text

    text = read_text(file)
    with input_errors_from(file):
        profile = parse_profile_text(text)
    if not isinstance(profile, dict):
        raise_input_error(f"{file}: must contain one object with the fields of a GPU profile, got {profile!r:.60}")
    return profile
