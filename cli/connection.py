"""Contexts: the services that this user has logged into, kept in a file that only the user may read.

    ~/.config/ebbtide/config.yaml      (XDG_CONFIG_HOME is heeded)
    current: prod
    contexts: {prod: {url: https://..., token: ebk_...}}

--url comes before EBBTIDE_URL, that before --context of `login`, EBBTIDE_CONTEXT and the current context. A token of a
context is sent to that context's URL and to no other; EBBTIDE_TOKEN comes before it.

Talking to a running service: its URL, and what a refusal means for the exit code.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.inputs import CommandError, InputError, input_errors_from

if TYPE_CHECKING:
    from api.client import Client, ProblemError


LOCAL_SERVICE_URL = "http://127.0.0.1:8787"


@dataclass(frozen=True, slots=True)
class Target:
    """A service and what one shows it. `context` is empty where none says so."""

    url: str
    token: str
    context: str = ""


@dataclass(slots=True)
class Contexts:
    """What the file holds."""

    current: str = ""
    targets: dict[str, Target] = field(default_factory=dict)


def resolve_target(url: str) -> Target:
    """The service that a command talks to: at `url`, or where that is empty, of the context in use.

    Raises:
        BadInput: EBBTIDE_CONTEXT names no context, or the file cannot be used.
    """
    contexts, token = load_contexts(), os.environ.get("EBBTIDE_TOKEN", "")
    name = os.environ.get("EBBTIDE_CONTEXT", "") or contexts.current
    if name and name not in contexts.targets:
        raise InputError(f"EBBTIDE_CONTEXT: got {name!r}; allowed: {_format_context_names(contexts)}")
    chosen = contexts.targets.get(name, Target(LOCAL_SERVICE_URL, ""))
    if not url or url.rstrip("/") == chosen.url.rstrip("/"):
        return Target(chosen.url, token or chosen.token, name)
    return Target(url, token)


def get_context(contexts: Contexts, name: str) -> Target:
    """Raises BadInput where there is no such context."""
    if name not in contexts.targets:
        raise InputError(f"context: got {name!r}; allowed: {_format_context_names(contexts)}")
    return contexts.targets[name]


def get_config_path() -> Path | None:
    """None for a user without a home, as in a container."""
    if given := os.environ.get("XDG_CONFIG_HOME"):
        return Path(given) / "ebbtide" / "config.yaml"
    try:
        return Path.home() / ".config" / "ebbtide" / "config.yaml"
    except RuntimeError:
        return None


def load_contexts() -> Contexts:
    """Empty where there is no file.

    Raises:
        BadInput: others may read it, or it is not what `save` writes.
    """
    path = get_config_path()
    if path is None or not path.is_file():
        return Contexts()
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        raise InputError(
            f"{path} has mode {mode:04o} and holds tokens: `chmod 600 {path}`, so that nobody else reads it"
        )
    import yaml

    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        told = document.get("contexts", {}).items()
        targets = {str(name): Target(each["url"], each.get("token", ""), str(name)) for name, each in told}
        return Contexts(str(document.get("current", "")), targets)
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as wrong:
        raise InputError(
            f"{path}: cannot be read ({type(wrong).__name__}): `ebbtide login` writes a new one"
        ) from wrong


def save_contexts(contexts: Contexts) -> Path:
    """Writes beside the file and replaces it, so that nobody ever reads half of it.

    Raises:
        BadInput: there is nowhere to write.
    """
    import yaml

    path = get_config_path()
    if path is None:
        raise InputError(
            "there is no home folder to keep contexts in: set XDG_CONFIG_HOME, or EBBTIDE_URL and EBBTIDE_TOKEN"
        )
    document = {
        "current": contexts.current,
        "contexts": {name: {"url": each.url, "token": each.token} for name, each in contexts.targets.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mkstemp creates with mode 0600
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yaml.safe_dump(document, file, sort_keys=False)
        Path(draft).replace(path)
    except OSError as wrong:
        raise InputError(f"{path}: cannot be written: {wrong.strerror or wrong}") from wrong
    return path


def _format_context_names(contexts: Contexts) -> str:
    return ", ".join(sorted(contexts.targets)) or "none; `ebbtide login` makes one"


DEFAULT_URL = ""
"""The context in use says; without one, a service on this machine."""

UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="EBBTIDE_URL",
        help="The service to talk to; without it, that of the context in use, else one on this machine.",
        rich_help_panel="Service",
        show_default=False,
    ),
]

# A service answers these to a request that was wrong in itself, not to one that only could not be met.
INPUT_ERROR_STATUSES = frozenset({400, 409, 413, 415, 422})


_REMEDIES = {
    401: " (log in with `ebbtide login`, or set EBBTIDE_TOKEN)",
    403: " (`ebbtide whoami` shows what you may do; an admin grants more)",
}


@contextmanager
def service_client(url: str) -> Iterator[Client]:
    """A client of the service at `url`, or of the context in use, with its token; what the service refuses becomes
    BadInput (exit 2) or Failed (exit 1)."""
    with target_client(resolve_target(url)) as client:
        yield client


@contextmanager
def target_client(target: Target) -> Iterator[Client]:
    from api.client import Client, ProblemError, UnreachableError

    with input_errors_from("--url"):
        client = Client(target.url, token=target.token)
    try:
        with client:
            yield client
    except ProblemError as problem:
        kind = InputError if problem.status in INPUT_ERROR_STATUSES else CommandError
        raise kind(format_problem(problem) + _REMEDIES.get(problem.status, "")) from problem
    except UnreachableError as silent:
        raise CommandError(f"{silent} (start a service with `ebbtide serve`, or name another with --url)") from silent


def format_problem(problem: ProblemError) -> str:
    """A problem as one line: what was refused, and what is wrong with each field unless that was said already."""
    said = problem.detail or problem.title or f"HTTP {problem.status}"
    return "; ".join([said, *(error.message for error in problem.errors if error.message not in said)])
