"""`login`, `whoami`, and the contexts that logging in makes.

API tokens: made over the API or, the first one, straight in the database of a service that runs here.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.fleet import has_no_subcommand
from cli.commands.service import DatabaseOption, read_settings
from cli.connection import (
    DEFAULT_URL,
    Contexts,
    Target,
    UrlOption,
    get_context,
    load_contexts,
    resolve_target,
    save_contexts,
    service_client,
    target_client,
)
from cli.inputs import CommandError, InputError, input_errors_from, raise_input_error
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

    from scheduler.store.sql_store import SqlStore


contexts_app = typer.Typer(name="context", help="List, use or delete the services that you have logged into.")

ContextArgument = Annotated[str, typer.Argument(metavar="CONTEXT", help="As `ebbtide login --context` named it.")]
ContextNameOption = Annotated[str, typer.Option("--context", help="What to call this service from now on.")]


def login(
    url: UrlOption = DEFAULT_URL, context: ContextNameOption = "default", output: OutputOption = OutputFormat.TABLE
) -> None:
    """Keep a service's URL and your token for it, once the service has said who you are. The token is asked for
    without being shown, or read from standard input."""
    contexts = load_contexts()
    if not url:
        at_hand = contexts.targets.get(context) or resolve_target("")
        url = typer.prompt("URL", default=at_hand.url, err=True) if sys.stdin.isatty() else at_hand.url
    token = typer.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise InputError("token: got nothing that is one; allowed: ebk_... or a JWT, as an admin gave it to you")
    with target_client(Target(url, token)) as client:
        who = client.whoami()
    contexts.targets[context] = Target(url, token, context)
    contexts.current = context
    path = save_contexts(contexts)
    print_message(f"Kept in {path} as context {context}, which is in use from now on.")
    print_document(
        {**who, "url": url, "context": context},
        output,
        lambda: render_facts(_format_caller(who["name"], who["grants"], url)),
    )


def whoami(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Say who you are to the service, and what you may do there."""
    with service_client(url) as client:
        who = client.whoami()
    print_document(
        who, output, lambda: render_facts(_format_caller(who["name"], who["grants"], resolve_target(url).url))
    )


@contexts_app.callback(invoke_without_command=True)
def context(context: typer.Context, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_contexts(output)


@contexts_app.command("list")
def list_contexts(output: OutputOption = OutputFormat.TABLE) -> None:
    """List the contexts, without their tokens."""
    contexts = load_contexts()
    rows = [
        {"name": name, "url": each.url, "current": name == contexts.current}
        for name, each in sorted(contexts.targets.items())
    ]
    print_document(
        rows,
        output,
        lambda: render_table(
            ([str(row["name"]), str(row["url"]), "in use" if row["current"] else ""] for row in rows),
            headers=["context", "url", ""],
            empty="There are no contexts; `ebbtide login` makes one.",
        ),
    )


@contexts_app.command("use")
def use_context(name: ContextArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Talk to this context's service from now on."""
    contexts = load_contexts()
    target = get_context(contexts, name)
    contexts.current = name
    save_contexts(contexts)
    print_document(
        {"context": name, "url": target.url}, output, lambda: render_facts({"in use": f"{name}, {target.url}"})
    )


@contexts_app.command("delete")
def delete_context(name: ContextArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Forget a context and its token. The token stays good: `ebbtide token revoke` ends it."""
    contexts = load_contexts()
    get_context(contexts, name)
    left = {each: target for each, target in contexts.targets.items() if each != name}
    save_contexts(Contexts("" if contexts.current == name else contexts.current, left))
    print_document({"context": name}, output, lambda: render_facts({"deleted": name}))


def _format_caller(name: str, grants: list[str], url: str) -> dict[str, str]:
    return {"you are": name, "with": ", ".join(grants) or "no role", "at": url}


tokens_app = typer.Typer(name="token", help="Make, list or revoke API tokens.")

TokenNameOption = Annotated[str, typer.Option("--name", help="Who asks with it; jobs are owned by this name.")]
GrantOption = Annotated[
    list[str],
    typer.Option("--grant", metavar="ROLE[:QUEUE]", help="viewer, submitter, queue-admin or admin; again for more."),
]
ExpiresOption = Annotated[str, typer.Option("--expires", metavar="TIME", help="How long it is good, as 90d or 12h.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print the secret and nothing else.")]
TokenArgument = Annotated[str, typer.Argument(metavar="TOKEN", help="Its id, as `ebbtide token list` shows it.")]
_DURATION_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0}


@tokens_app.callback(invoke_without_command=True)
def token(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_tokens(url, output=output)


@tokens_app.command("create")
def create_token(
    name: TokenNameOption,
    grant: GrantOption,
    expires: ExpiresOption = "",
    url: UrlOption = DEFAULT_URL,
    *,
    database_url: DatabaseOption = None,
    quiet: QuietOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make a token; its secret is shown once. Over the API where --url, EBBTIDE_URL or a context names a service; else,
    or with --database-url, straight in the database of the service's settings."""
    document: dict[str, Any] = {"name": name, "grants": grant}
    if expires:
        document["expires_in_s"] = _parse_duration(expires)
    if _uses_database(url, database_url):
        made = _create_in_database(document, database_url)
    else:
        with service_client(url) as client:
            made = dict(client.create_token(name, grant, expires_in_s=document.get("expires_in_s")))
    print_message("The secret is shown this once: keep it now.")
    if quiet:
        typer.echo(made["secret"])
        return
    shown = {"token": made["secret"], "id": made["id"], "name": name, "grants": ", ".join(made["grants"])}
    print_document(
        made, output, lambda: render_facts({**shown, "expires": _format_optional_time(made["expires_at_s"], "never")})
    )


@tokens_app.command("list")
def list_tokens(
    url: UrlOption = DEFAULT_URL, *, database_url: DatabaseOption = None, output: OutputOption = OutputFormat.TABLE
) -> None:
    """List all tokens, without their secrets."""
    if _uses_database(url, database_url):
        from api.tokens import token_view

        with _open_store(database_url) as store:
            found: list[Any] = [token_view(each) for each in store.tokens.list_tokens(after="", limit=1_000_000)]
    else:
        with service_client(url) as client:
            found = list(client.tokens())
    print_document(found, output, lambda: _render_tokens(found))


@tokens_app.command("revoke")
def revoke_token(
    token: TokenArgument,
    url: UrlOption = DEFAULT_URL,
    *,
    database_url: DatabaseOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """End a token: the service refuses it within 5 s."""
    if _uses_database(url, database_url):
        gone: Any = _revoke_in_database(token, database_url)
    else:
        with service_client(url) as client:
            gone = client.revoke_token(token)
    print_document(gone, output, lambda: render_facts({"revoked": f"{gone['id']} of {gone['name']}"}))


def _uses_database(url: str, database_url: str | None) -> bool:
    return database_url is not None or not (url or resolve_target("").context)


def _create_in_database(document: Mapping[str, Any], database_url: str | None) -> dict[str, Any]:
    from pydantic import ValidationError

    from api.identity.principals import Grant, Principal, generate_token
    from api.tokens import TokenDocument, token_audit_entry, token_view
    from scheduler.documents.document import InvalidDocumentError, to_invalid_fields

    try:
        checked = TokenDocument.model_validate(document)
    except ValidationError as wrong:
        raise_input_error(str(InvalidDocumentError(*to_invalid_fields(wrong.errors()))))
    now_s, by = time.time(), Principal("command line", ())
    ends_s = None if checked.expires_in_s is None else now_s + checked.expires_in_s
    grants = map(Grant.parse, checked.grants)
    made, secret = generate_token(checked.name, grants, created_by=by.name, now_s=now_s, expires_at_s=ends_s)
    with _open_store(database_url) as store:
        store.tokens.add(made, token_audit_entry("CreateToken", made, by, now_s))
    return {**token_view(made), "secret": secret}


def _revoke_in_database(token_id: str, database_url: str | None) -> Mapping[str, Any]:
    from api.identity.principals import Principal
    from api.tokens import token_audit_entry, token_view

    with _open_store(database_url) as store:
        found, now_s = store.tokens.find_by_id(token_id), time.time()
        if found is None:
            raise CommandError(f"there is no token {token_id!r}; `ebbtide token list` shows all")
        entry = token_audit_entry("RevokeToken", found, Principal("command line", ()), now_s)
        return token_view(store.tokens.revoke(token_id, now_s, entry) or found)


@contextmanager
def _open_store(url: str | None) -> Iterator[SqlStore]:
    from cli.commands.service import redact_database_url
    from scheduler.store.protocol import UnavailableError
    from scheduler.store.sql_store import SqlStore

    if url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = url
    settings = read_settings()
    with input_errors_from("EBBTIDE_DATABASE_URL"):
        store = SqlStore(settings.database_url)
    print_message(f"Straight in the database {redact_database_url(settings.database_url)}, as no service is named.")
    try:
        yield store
    except UnavailableError as away:
        raise CommandError(str(away)) from away
    finally:
        store.close()


def _parse_duration(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([mhd])", text)
    return (
        int(found[1]) * _DURATION_UNITS_S[found[2]]
        if found
        else raise_input_error(f"--expires: got {text!r}; allowed: 30m, 12h, 90d ...")
    )


def _render_tokens(found: Sequence[Mapping[str, Any]]) -> RenderableType:
    return render_table(
        (
            [
                each["id"],
                each["name"],
                f"{each['prefix']}...",
                ", ".join(each["grants"]),
                _format_optional_time(each["last_used_at_s"], "never"),
                "revoked" if each["revoked_at_s"] is not None else _format_optional_time(each["expires_at_s"], "never"),
            ]
            for each in found
        ),
        headers=["token", "name", "begins", "grants", "last used", "expires"],
        empty="There are no tokens.",
    )


def _format_optional_time(at_s: float | None, otherwise: str) -> str:
    return otherwise if at_s is None else format_time(at_s)
