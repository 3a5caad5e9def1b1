"""`login`, `whoami`, and the contexts that logging in makes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from scheduler.cli.contexts import Contexts, Target, known, load, save, target_of
from scheduler.cli.failure import BadInput
from scheduler.cli.fleet import is_list
from scheduler.cli.output import Format, OutputOption, columns, emit, facts, say
from scheduler.cli.service import DEFAULT_URL, UrlOption, connected, service

app = typer.Typer(name="context", help="List, use or delete the services that you have logged into.")

NameArgument = Annotated[str, typer.Argument(metavar="CONTEXT", help="As `ebbtide login --context` named it.")]
ContextOption = Annotated[str, typer.Option("--context", help="What to call this service from now on.")]


def login(
    url: UrlOption = DEFAULT_URL, context: ContextOption = "default", output: OutputOption = Format.TABLE
) -> None:
    """Keep a service's URL and your token for it, once the service has said who you are. The token is asked for
    without being shown, or read from standard input."""
    contexts = load()
    if not url:
        at_hand = contexts.targets.get(context) or target_of("")
        url = typer.prompt("URL", default=at_hand.url, err=True) if sys.stdin.isatty() else at_hand.url
    token = typer.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise BadInput("token: got nothing that is one; allowed: ebk_... or a JWT, as an admin gave it to you")
    with connected(Target(url, token)) as client:
        who = client.whoami()
    contexts.targets[context] = Target(url, token, context)
    contexts.current = context
    path = save(contexts)
    say(f"Kept in {path} as context {context}, which is in use from now on.")
    emit({**who, "url": url, "context": context}, output, lambda: facts(_who(who["name"], who["grants"], url)))


def whoami(url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Say who you are to the service, and what you may do there."""
    with service(url) as client:
        who = client.whoami()
    emit(who, output, lambda: facts(_who(who["name"], who["grants"], target_of(url).url)))


@app.callback(invoke_without_command=True)
def context(context: typer.Context, output: OutputOption = Format.TABLE) -> None:
    if is_list(context):
        list_contexts(output)


@app.command("list")
def list_contexts(output: OutputOption = Format.TABLE) -> None:
    """List the contexts, without their tokens."""
    contexts = load()
    rows = [
        {"name": name, "url": each.url, "current": name == contexts.current}
        for name, each in sorted(contexts.targets.items())
    ]
    emit(
        rows,
        output,
        lambda: columns(
            ([str(row["name"]), str(row["url"]), "in use" if row["current"] else ""] for row in rows),
            heads=["context", "url", ""],
            empty="There are no contexts; `ebbtide login` makes one.",
        ),
    )


@app.command("use")
def use_context(name: NameArgument, output: OutputOption = Format.TABLE) -> None:
    """Talk to this context's service from now on."""
    contexts = load()
    target = known(contexts, name)
    contexts.current = name
    save(contexts)
    emit({"context": name, "url": target.url}, output, lambda: facts({"in use": f"{name}, {target.url}"}))


@app.command("delete")
def delete_context(name: NameArgument, output: OutputOption = Format.TABLE) -> None:
    """Forget a context and its token. The token stays good: `ebbtide token revoke` ends it."""
    contexts = load()
    known(contexts, name)
    left = {each: target for each, target in contexts.targets.items() if each != name}
    save(Contexts("" if contexts.current == name else contexts.current, left))
    emit({"context": name}, output, lambda: facts({"deleted": name}))


def _who(name: str, grants: list[str], url: str) -> dict[str, str]:
    return {"you are": name, "with": ", ".join(grants) or "no role", "at": url}
