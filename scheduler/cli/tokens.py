"""API tokens: made over the API or, the first one, straight in the database of a service that runs here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.contexts import target_of
from scheduler.cli.failure import Failed, blaming, refuse
from scheduler.cli.fleet import is_list
from scheduler.cli.humanise import clock
from scheduler.cli.output import Format, OutputOption, columns, emit, facts, say
from scheduler.cli.serve import DatabaseOption, read_settings
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.store.sql import SqlStore

app = typer.Typer(name="token", help="Make, list or revoke API tokens.")

NameOption = Annotated[str, typer.Option("--name", help="Who asks with it; jobs are owned by this name.")]
GrantOption = Annotated[
    list[str],
    typer.Option("--grant", metavar="ROLE[:QUEUE]", help="viewer, submitter, queue-admin or admin; again for more."),
]
ExpiresOption = Annotated[str, typer.Option("--expires", metavar="TIME", help="How long it is good, as 90d or 12h.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print the secret and nothing else.")]
TokenArgument = Annotated[str, typer.Argument(metavar="TOKEN", help="Its id, as `ebbtide token list` shows it.")]
_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0}


@app.callback(invoke_without_command=True)
def token(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    if is_list(context):
        list_tokens(url, output=output)


@app.command("create")
def create_token(
    name: NameOption,
    grant: GrantOption,
    expires: ExpiresOption = "",
    url: UrlOption = DEFAULT_URL,
    *,
    database_url: DatabaseOption = None,
    quiet: QuietOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Make a token; its secret is shown once. Over the API where --url, EBBTIDE_URL or a context names a service; else,
    or with --database-url, straight in the database of the service's settings."""
    document: dict[str, Any] = {"name": name, "grants": grant}
    if expires:
        document["expires_in_s"] = _seconds(expires)
    if _is_straight(url, database_url):
        made = _made_here(document, database_url)
    else:
        with service(url) as client:
            made = dict(client.create_token(name, grant, expires_in_s=document.get("expires_in_s")))
    say("The secret is shown this once: keep it now.")
    if quiet:
        typer.echo(made["secret"])
        return
    shown = {"token": made["secret"], "id": made["id"], "name": name, "grants": ", ".join(made["grants"])}
    emit(made, output, lambda: facts({**shown, "expires": _when(made["expires_at_s"], "never")}))


@app.command("list")
def list_tokens(
    url: UrlOption = DEFAULT_URL, *, database_url: DatabaseOption = None, output: OutputOption = Format.TABLE
) -> None:
    """List all tokens, without their secrets."""
    if _is_straight(url, database_url):
        from api.answers.identity import token_view

        with _database(database_url) as store:
            found: list[Any] = [token_view(each) for each in store.tokens.page(after="", limit=1_000_000)]
    else:
        with service(url) as client:
            found = list(client.tokens())
    emit(found, output, lambda: _rows(found))


@app.command("revoke")
def revoke_token(
    token: TokenArgument,
    url: UrlOption = DEFAULT_URL,
    *,
    database_url: DatabaseOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """End a token: the service refuses it within 5 s."""
    if _is_straight(url, database_url):
        gone: Any = _revoked_here(token, database_url)
    else:
        with service(url) as client:
            gone = client.revoke_token(token)
    emit(gone, output, lambda: facts({"revoked": f"{gone['id']} of {gone['name']}"}))


def _is_straight(url: str, database_url: str | None) -> bool:
    return database_url is not None or not (url or target_of("").context)


def _made_here(document: Mapping[str, Any], database_url: str | None) -> dict[str, Any]:
    from pydantic import ValidationError

    from api.answers.identity import token_view
    from api.identity.api_token import new_token
    from api.identity.principal import Grant, Principal
    from api.routers.tokens import TokenDocument, token_entry
    from scheduler.documents.refusal import RefusedError, refusals

    try:
        checked = TokenDocument.model_validate(document)
    except ValidationError as wrong:
        refuse(str(RefusedError(*refusals(wrong.errors()))))
    now_s, by = time.time(), Principal("command line", ())
    ends_s = None if checked.expires_in_s is None else now_s + checked.expires_in_s
    grants = map(Grant.of, checked.grants)
    made, secret = new_token(checked.name, grants, created_by=by.name, now_s=now_s, expires_at_s=ends_s)
    with _database(database_url) as store:
        store.tokens.add(made, token_entry("CreateToken", made, by, now_s))
    return {**token_view(made), "secret": secret}


def _revoked_here(token_id: str, database_url: str | None) -> Mapping[str, Any]:
    from api.answers.identity import token_view
    from api.identity.principal import Principal
    from api.routers.tokens import token_entry

    with _database(database_url) as store:
        found, now_s = store.tokens.by_id(token_id), time.time()
        if found is None:
            raise Failed(f"there is no token {token_id!r}; `ebbtide token list` shows all")
        entry = token_entry("RevokeToken", found, Principal("command line", ()), now_s)
        return token_view(store.tokens.revoke(token_id, now_s, entry) or found)


@contextmanager
def _database(url: str | None) -> Iterator[SqlStore]:
    from scheduler.cli.serve import _shown
    from scheduler.store.protocol import UnavailableError
    from scheduler.store.sql import SqlStore

    if url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = url
    settings = read_settings()
    with blaming("EBBTIDE_DATABASE_URL"):
        store = SqlStore(settings.database_url)
    say(f"Straight in the database {_shown(settings.database_url)}, as no service is named.")
    try:
        yield store
    except UnavailableError as away:
        raise Failed(str(away)) from away
    finally:
        store.close()


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([mhd])", text)
    return (
        int(found[1]) * _UNITS_S[found[2]] if found else refuse(f"--expires: got {text!r}; allowed: 30m, 12h, 90d ...")
    )


def _rows(found: Sequence[Mapping[str, Any]]) -> RenderableType:
    return columns(
        (
            [
                each["id"],
                each["name"],
                f"{each['prefix']}...",
                ", ".join(each["grants"]),
                _when(each["last_used_at_s"], "never"),
                "revoked" if each["revoked_at_s"] is not None else _when(each["expires_at_s"], "never"),
            ]
            for each in found
        ),
        heads=["token", "name", "begins", "grants", "last used", "expires"],
        empty="There are no tokens.",
    )


def _when(at_s: float | None, otherwise: str) -> str:
    return otherwise if at_s is None else clock(at_s)
