"""`ebbtide accounts`: service accounts and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.identity import GrantOption, QuietOption, format_optional_time, parse_duration, require_secret
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import has_no_subcommand
from cli.output import (
    OutputFormat,
    OutputOption,
    format_time,
    print_document,
    print_message,
    render_facts,
    render_table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(name="accounts", help="Manage service accounts, the callers of programs, and rotate their tokens.")

AccountArgument = Annotated[str, typer.Argument(metavar="ACCOUNT", help="Name of the service account.")]
ExpiresOption = Annotated[
    str, typer.Option("--expires", metavar="TIME", help="Lifetime of the account, such as 90d. Default: no expiry.")
]
TokenExpiresOption = Annotated[
    str, typer.Option("--token-expires", metavar="TIME", help="Lifetime of the token. Default: that of the account.")
]
OverlapOption = Annotated[
    str,
    typer.Option(
        "--overlap", metavar="TIME", help="How long earlier tokens stay valid, at most 30d; 0s ends them now."
    ),
]


@app.callback(invoke_without_command=True)
def accounts(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_accounts(url, output)


@app.command("create")
def create_account(
    name: AccountArgument,
    grant: GrantOption,
    expires: ExpiresOption = "",
    token_expires: TokenExpiresOption = "",
    url: UrlOption = DEFAULT_URL,
    *,
    quiet: QuietOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Create a service account, and print its first token once."""
    lifetime_s, token_lifetime_s = (
        _parse_lifetime(expires, "--expires"),
        _parse_lifetime(token_expires, "--token-expires"),
    )
    with service_client(url) as client:
        created = client.create_account(name, grant, expires_in_s=lifetime_s, token_expires_in_s=token_lifetime_s)
    _print_new_token(created, quiet, output)


@app.command("list")
def list_accounts(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List service accounts with their roles, valid tokens and last use."""
    with service_client(url) as client:
        result: list[Any] = list(client.accounts())
    print_document(result, output, lambda: render_accounts(result))


@app.command("rotate")
def rotate_account(
    name: AccountArgument,
    overlap: OverlapOption = "24h",
    token_expires: TokenExpiresOption = "",
    url: UrlOption = DEFAULT_URL,
    *,
    quiet: QuietOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Create another token of an account, and print it once. Earlier tokens expire at the end of the overlap."""
    overlap_s, token_lifetime_s = (
        parse_duration(overlap, option="--overlap"),
        _parse_lifetime(token_expires, "--token-expires"),
    )
    with service_client(url) as client:
        rotated = client.rotate_account(name, overlap_s=overlap_s, token_expires_in_s=token_lifetime_s)
    _print_new_token(rotated, quiet, output)


@app.command("disable")
def disable_account(
    name: AccountArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Reject all tokens of an account within 5 s, until it is enabled."""
    _change_account(name, {"enabled": False}, url, output)


@app.command("enable")
def enable_account(
    name: AccountArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Accept the tokens of a disabled account again."""
    _change_account(name, {"enabled": True}, url, output)


@app.command("delete")
def delete_account(
    name: AccountArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Delete an account and revoke its tokens. Its jobs continue."""
    with service_client(url) as client:
        client.delete_account(name)
    print_document({"name": name}, output, lambda: render_facts({"deleted": name}))


def render_accounts(accounts: Iterable[Mapping[str, Any]]) -> RenderableType:
    return render_table(
        (
            [
                each["name"],
                ", ".join(each["grants"]),
                str(len(each["tokens"])),
                format_optional_time(each["last_used_at_s"], "never"),
                "disabled"
                if each["disabled_at_s"] is not None
                else format_optional_time(each["expires_at_s"], "never"),
            ]
            for each in accounts
        ),
        headers=["account", "grants", "tokens", "last used", "expires"],
        right_aligned=["tokens"],
        empty="There are no service accounts.",
    )


def _change_account(name: str, change: Mapping[str, Any], url: str, output: OutputFormat) -> None:
    with service_client(url) as client:
        changed = client.change_account(name, change)
    state = "enabled" if changed["disabled_at_s"] is None else "disabled"
    print_document(changed, output, lambda: render_facts({"account": f"{name} {state}"}))


def _print_new_token(created: Mapping[str, Any], quiet: bool, output: OutputFormat) -> None:
    account, token = created["account"], created["token"]
    require_secret(token, f"run `ebbtide accounts rotate {account['name']} --overlap 0s` for another token")
    print_message("The token is shown only once. Save it now.")
    if quiet:
        typer.echo(token["secret"])
        return
    facts = {
        "token": token["secret"],
        "account": account["name"],
        "grants": ", ".join(account["grants"]),
        "expires": format_optional_time(token["expires_at_s"], "with the account"),
    }
    if "overlap_until_s" in created:
        facts["earlier tokens until"] = format_time(created["overlap_until_s"])
    print_document(dict(created), output, lambda: render_facts(facts))


def _parse_lifetime(text: str, option: str) -> float | None:
    return parse_duration(text, option=option) if text else None
