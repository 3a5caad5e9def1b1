"""Identity commands: `login`, `whoami`, `context` and `token`.

Tokens are managed through the API. The first token of a service is created directly in its database.
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

from cli.commands.service import DatabaseOption
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
from cli.exit_codes import CommandError, InputError, UnreachableError
from cli.inputs import has_no_subcommand, raise_input_error
from cli.output import (
    OutputFormat,
    OutputOption,
    format_time,
    print_document,
    print_message,
    render_facts,
    render_table,
)
from cli.service_settings import database_errors, read_settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ebbtide.client.views import WhoAmIView
    from scheduler.store.sql_store import SqlStore


contexts_app = typer.Typer(name="context", help="List, use or delete saved services.")

ContextArgument = Annotated[
    str, typer.Argument(metavar="CONTEXT", help="Context name, set by `ebbtide login --context`.")
]
ContextNameOption = Annotated[str, typer.Option("--context", help="Name to save this service under.")]


def login(
    url: UrlOption = DEFAULT_URL, context: ContextNameOption = "default", output: OutputOption = OutputFormat.TABLE
) -> None:
    """Save a service's URL and your token for it. Prompts for the token without echo, or reads it from stdin.

    The token is saved only if the service accepts it.
    """
    contexts = load_contexts()
    if not url:
        known = contexts.targets.get(context) or resolve_target("")
        url = typer.prompt("URL", default=known.url, err=True) if sys.stdin.isatty() else known.url
    token = typer.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise InputError("token: the input is not a token. Enter the ebk_... token or JWT that you got from an admin.")
    with target_client(Target(url, token)) as client:
        caller = client.whoami()
    contexts.targets[context] = Target(url, token, context)
    contexts.current = context
    path = save_contexts(contexts)
    print_message(f"Saved context {context} in {path} and made it the current context.")
    print_document(
        {**caller, "url": url, "context": context},
        output,
        lambda: render_facts(_format_caller(caller, url)),
    )


def whoami(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show your name, id and roles on the service."""
    with service_client(url) as client:
        caller = client.whoami()
    print_document(caller, output, lambda: render_facts(_format_caller(caller, resolve_target(url).url)))


@contexts_app.callback(invoke_without_command=True)
def context(context: typer.Context, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_contexts(output)


@contexts_app.command("list")
def list_contexts(output: OutputOption = OutputFormat.TABLE) -> None:
    """List contexts without their tokens."""
    contexts = load_contexts()
    rows = [
        {"name": name, "url": each.url, "current": name == contexts.current}
        for name, each in sorted(contexts.targets.items())
    ]
    print_document(
        rows,
        output,
        lambda: render_table(
            ([str(row["name"]), str(row["url"]), "current" if row["current"] else ""] for row in rows),
            headers=["context", "url", ""],
            empty="There are no contexts. `ebbtide login` creates one.",
        ),
    )


@contexts_app.command("use")
def use_context(name: ContextArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Make a context the current one."""
    contexts = load_contexts()
    target = get_context(contexts, name)
    contexts.current = name
    save_contexts(contexts)
    print_document(
        {"context": name, "url": target.url}, output, lambda: render_facts({"current context": f"{name}, {target.url}"})
    )


@contexts_app.command("delete")
def delete_context(name: ContextArgument, output: OutputOption = OutputFormat.TABLE) -> None:
    """Delete a context and its saved token. The token stays valid; `ebbtide token revoke` revokes it."""
    contexts = load_contexts()
    get_context(contexts, name)
    remaining = {each: target for each, target in contexts.targets.items() if each != name}
    save_contexts(Contexts("" if contexts.current == name else contexts.current, remaining))
    print_document({"context": name}, output, lambda: render_facts({"deleted": name}))


def _format_caller(caller: WhoAmIView, url: str) -> dict[str, str]:
    roles = ", ".join(caller["grants"]) or "none"
    return {"name": caller["name"], "id": caller["owner_id"], "roles": roles, "service": url}


tokens_app = typer.Typer(name="token", help="Create, list or revoke API tokens.")

TokenNameOption = Annotated[
    str, typer.Option("--name", help="Name of the caller; it owns the jobs submitted with the token.")
]
GrantOption = Annotated[
    list[str],
    typer.Option("--grant", metavar="ROLE[:QUEUE]", help="viewer, submitter, queue-admin or admin. Repeatable."),
]
ExpiresOption = Annotated[
    str, typer.Option("--expires", metavar="TIME", help="Lifetime, such as 90d or 12h. Default: no expiry.")
]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print only the token, for scripts.")]
TokenArgument = Annotated[str, typer.Argument(metavar="TOKEN", help="Token ID, as listed by `ebbtide token list`.")]
_DURATION_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


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
    """Create a token and print it once.

    Uses the API if a service is configured; otherwise, or with --database-url, writes to the database directly.
    """
    document: dict[str, Any] = {"name": name, "grants": grant}
    if expires:
        document["expires_in_s"] = parse_duration(expires)
    if _uses_database(url, database_url):
        created = _create_in_database(document, database_url)
    else:
        with service_client(url) as client:
            created = dict(client.create_token(name, grant, expires_in_s=document.get("expires_in_s")))
    require_secret(created, "revoke it with `ebbtide token revoke`, and create another")
    print_message("The token is shown only once. Save it now.")
    if quiet:
        typer.echo(created["secret"])
        return
    facts = {
        "token": created["secret"],
        "id": created["id"],
        "name": name,
        "grants": ", ".join(created["grants"]),
        "expires": format_optional_time(created["expires_at_s"], "never"),
    }
    print_document(created, output, lambda: render_facts(facts))


@tokens_app.command("list")
def list_tokens(
    url: UrlOption = DEFAULT_URL, *, database_url: DatabaseOption = None, output: OutputOption = OutputFormat.TABLE
) -> None:
    """List all tokens without their secrets."""
    if _uses_database(url, database_url):
        from api.tokens import token_view

        with _open_store(database_url) as store:
            result: list[Any] = [token_view(each) for each in store.tokens.list_tokens(after="", limit=1_000_000)]
    else:
        with service_client(url) as client:
            result = list(client.tokens())
    print_document(result, output, lambda: _render_tokens(result))


@tokens_app.command("revoke")
def revoke_token(
    token: TokenArgument,
    url: UrlOption = DEFAULT_URL,
    *,
    database_url: DatabaseOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Revoke a token. The service rejects it within 5 s."""
    if _uses_database(url, database_url):
        revoked: Any = _revoke_in_database(token, database_url)
    else:
        with service_client(url) as client:
            revoked = client.revoke_token(token)
    print_document(revoked, output, lambda: render_facts({"revoked": f"{revoked['id']} of {revoked['name']}"}))


def require_secret(token: Mapping[str, Any], advice: str) -> None:
    """Raise an error if the secret was in a response that was lost: the service stores only its digest."""
    if "secret" not in token:
        raise CommandError(f"token {token['id']} was created, but the response with its secret was lost; {advice}")


def _uses_database(url: str, database_url: str | None) -> bool:
    if database_url is not None or url:
        return database_url is not None
    target = resolve_target("")
    return not (target.context or target.token)


def _create_in_database(document: Mapping[str, Any], database_url: str | None) -> dict[str, Any]:
    from pydantic import ValidationError

    from api.identity.principals import Grant, Principal, generate_token
    from api.tokens import TokenDocument, token_audit_entry, token_view
    from scheduler.documents.document import InvalidDocumentError, to_invalid_fields
    from scheduler.domain.owner_ids import LOCAL_OWNER_ID

    try:
        checked = TokenDocument.model_validate(document)
    except ValidationError as error:
        raise_input_error(str(InvalidDocumentError(*to_invalid_fields(error.errors()))))
    now_s, caller = time.time(), Principal("command line", (), subject=LOCAL_OWNER_ID)
    expires_at_s = None if checked.expires_in_s is None else now_s + checked.expires_in_s
    grants = map(Grant.parse, checked.grants)
    token, secret = generate_token(checked.name, grants, created_by=caller.name, now_s=now_s, expires_at_s=expires_at_s)
    with _open_store(database_url) as store:
        store.tokens.add(token, token_audit_entry("CreateToken", token, caller, now_s))
    return {**token_view(token), "secret": secret}


def _revoke_in_database(token_id: str, database_url: str | None) -> Mapping[str, Any]:
    from api.identity.principals import Principal
    from api.tokens import token_audit_entry, token_view
    from scheduler.domain.owner_ids import LOCAL_OWNER_ID

    with _open_store(database_url) as store:
        token, now_s = store.tokens.find_by_id(token_id), time.time()
        caller = Principal("command line", (), subject=LOCAL_OWNER_ID)
        if token is None:
            raise CommandError(f"there is no token {token_id!r}; `ebbtide token list` lists all tokens")
        entry = token_audit_entry("RevokeToken", token, caller, now_s)
        return token_view(store.tokens.revoke(token_id, now_s, entry) or token)


@contextmanager
def _open_store(url: str | None) -> Iterator[SqlStore]:
    from cli.commands.service import redact_database_url
    from scheduler.store.protocol import UnavailableError
    from scheduler.store.sql_store import SqlStore

    if url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = url
    settings = read_settings()
    with database_errors():
        store = SqlStore(settings.database_url, chains_audit=settings.audit_chain)
    print_message(f"Using the database {redact_database_url(settings.database_url)} directly.")
    try:
        yield store
    except UnavailableError as error:
        raise UnreachableError(str(error)) from error
    finally:
        store.close()


def parse_duration(text: str, *, option: str = "--expires") -> float:
    """Return the seconds in the text of an option."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise_input_error(
            f"{option}: {text!r} is not a duration. Use a number and s, m, h or d, such as 30m, 12h or 90d."
        )
    return int(match[1]) * _DURATION_UNITS_S[match[2]]


def _render_tokens(tokens: Sequence[Mapping[str, Any]]) -> RenderableType:
    return render_table(
        (
            [
                each["id"],
                each["name"],
                f"{each['prefix']}...",
                ", ".join(each["grants"]),
                format_optional_time(each["last_used_at_s"], "never"),
                "revoked" if each["revoked_at_s"] is not None else format_optional_time(each["expires_at_s"], "never"),
            ]
            for each in tokens
        ),
        headers=["id", "name", "prefix", "grants", "last used", "expires"],
        empty="There are no tokens.",
    )


def format_optional_time(at_s: float | None, otherwise: str) -> str:
    return otherwise if at_s is None else format_time(at_s)
