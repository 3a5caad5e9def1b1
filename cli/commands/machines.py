"""`ebbtide machines`: lists and removes machines with an agent, and manages the tokens with which they join."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.identity import parse_duration
from cli.completion import complete_machine_names, complete_pool_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import has_no_subcommand
from cli.output import (
    OutputFormat,
    OutputOption,
    format_bytes,
    format_duration,
    format_gpus,
    format_time,
    print_document,
    print_message,
    render_facts,
    render_table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ebbtide.client.views import JoinTokenView, MachineDetailsView, MachineView


app = typer.Typer(name="machines", help="List or remove machines, or create tokens to join.")

MachineArgument = Annotated[
    str, typer.Argument(metavar="MACHINE", autocompletion=complete_machine_names, help="Name under which it joined.")
]
PoolOption = Annotated[
    str, typer.Option("--pool", autocompletion=complete_pool_names, help="Existing pool that the machines join.")
]
UsesOption = Annotated[int, typer.Option("--uses", min=1, help="How many machines may join with the token.")]
ExpiresOption = Annotated[str, typer.Option("--expires", metavar="TIME", help="Lifetime, such as 30m, 12h or 7d.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the token, for a token file.")]
TokenArgument = Annotated[
    str, typer.Argument(metavar="TOKEN", help="Token ID, as listed by `ebbtide machines tokens`.")
]


@app.callback(invoke_without_command=True)
def machines(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_machines(url, output)


@app.command("list")
def list_machines(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List machines with their pool, GPUs and last report."""
    with service_client(url) as client:
        result = client.machines()
    print_document(result, output, lambda: render_machines(result, time.time()))


@app.command("get")
def get_machine(
    machine: MachineArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Show a machine with its hardware."""
    with service_client(url) as client:
        result = client.machine(machine)
    print_document(result, output, lambda: render_facts(_list_facts(result)))


@app.command("remove")
def remove_machine(
    machine: MachineArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Revoke a machine's credential. Its node stays; drain it first to move its jobs."""
    with service_client(url) as client:
        result = client.remove_machine(machine)
    print_document(result, output, lambda: render_facts({"machine": f"{machine} removed"}))


@app.command("token")
def create_token(
    pool: PoolOption,
    uses: UsesOption = 1,
    expires: ExpiresOption = "1h",
    url: UrlOption = DEFAULT_URL,
    *,
    quiet: QuietOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Create a join token and print it once."""
    lifetime_s = parse_duration(expires)
    with service_client(url) as client:
        created = client.create_join_token(pool, uses=uses, expires_in_s=lifetime_s)
    print_message("The token is shown only once. Save it now.")
    if quiet:
        typer.echo(created["secret"])
        return
    facts = {
        "token": created["secret"],
        "id": created["id"],
        "pool": pool,
        "uses": str(created["uses_left"]),
        "expires": format_time(created["expires_at_s"]),
    }
    print_document(created, output, lambda: render_facts(facts))


@app.command("tokens")
def list_tokens(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List join tokens without their secrets."""
    with service_client(url) as client:
        result = client.join_tokens()
    print_document(result, output, lambda: render_tokens(result, time.time()))


@app.command("delete-token")
def delete_token(token: TokenArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Delete a join token. Machines that joined with it stay."""
    with service_client(url) as client:
        result = client.delete_join_token(token)
    print_document(result, output, lambda: render_facts({"token": f"{token} deleted"}))


def render_machines(machines: Iterable[MachineView], now_s: float) -> RenderableType:
    return render_table(
        (
            [
                each["name"],
                each["pool"] or "of its nodes",
                _format_gpus(each) + (" (differs from its node)" if each["problem"] else ""),
                each["address"],
                each["agent_version"],
                _format_seen(each, now_s),
            ]
            for each in machines
        ),
        headers=["machine", "pool", "GPUs", "address", "agent", "last report"],
        empty="No machine has joined. `ebbtide machines token` creates a token to join.",
    )


def render_tokens(tokens: Iterable[JoinTokenView], now_s: float) -> RenderableType:
    return render_table(
        (
            [
                each["id"],
                each["pool"],
                str(each["uses_left"]),
                "expired" if each["expires_at_s"] <= now_s else format_time(each["expires_at_s"]),
                each["created_by"],
            ]
            for each in tokens
        ),
        headers=["id", "pool", "uses left", "expires (UTC)", "created by"],
        right_aligned=["uses left"],
        empty="There are no join tokens.",
    )


def _list_facts(machine: MachineDetailsView) -> Mapping[str, str]:
    inventory: Any = machine["inventory"]
    facts = {
        "machine": machine["name"],
        "pool": machine["pool"],
        "GPUs": _format_gpus(machine),
        "product": ", ".join(sorted({gpu["name"] for gpu in inventory["gpus"]})),
        "links": ", ".join(sorted({link["kind"] for link in inventory["links"]})),
        "network": ", ".join(_format_interface(nic) for nic in inventory["nics"]),
        "processors": f"{inventory['cpus']}, {format_bytes(inventory['memory_bytes'])} of memory",
        "checkpoints": "\n".join(_format_path(path) for path in inventory["checkpoint_paths"]),
        "stated by hand": ", ".join(inventory["overrides"]),
        "address": machine["address"],
        "agent": machine["agent_version"],
        "containment": machine["containment"],
        "problem": machine["problem"],
        "joined (UTC)": format_time(machine["joined_at_s"]),
        "last report": _format_seen(machine, time.time()),
    }
    return {name: value for name, value in facts.items() if value}


def _format_gpus(machine: MachineView | MachineDetailsView) -> str:
    estimated = " (profile estimated)" if machine["estimated"] else ""
    return f"{format_gpus(machine['gpus'])} {machine['gpu']}{estimated}"


def _format_seen(machine: MachineView | MachineDetailsView, now_s: float) -> str:
    if machine["revoked_at_s"] is not None:
        return "removed"
    seen_at_s = machine["seen_at_s"]
    return "never" if seen_at_s is None else f"{format_duration(max(0.0, now_s - seen_at_s))} ago"


def _format_interface(nic: Mapping[str, Any]) -> str:
    speed = nic["speed_bits_per_s"]
    return f"{nic['name']} {speed / 1e9:g} Gb/s" if speed else str(nic["name"])


def _format_path(path: Mapping[str, Any]) -> str:
    if not path["exists"]:
        return f"{path['path']}: not there"
    state = "writable" if path["writable"] else "not writable"
    return f"{path['path']}: {state}, {format_bytes(path['free_bytes'])} free"
