"""Connections to a service: its URL, the token for it, and the errors of the client as errors of the command.

`ebbtide login` saves services as contexts in a file that only the user can read:

    ~/.config/ebbtide/config.yaml      (or under XDG_CONFIG_HOME)
    current: prod
    contexts: {prod: {url: https://..., token: ebk_...}}

The URL comes from --url, else EBBTIDE_URL, else the context EBBTIDE_CONTEXT, else the current context. EBBTIDE_TOKEN
overrides a context's token. A context's token is sent to that context's URL only. Without a token, the one of a service
that the user runs on this machine is used (`cli.local_service`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.exit_codes import ExitCode, InputError, ServiceError, choose_exit_code
from cli.local_service import find_local_service

if TYPE_CHECKING:
    from ebbtide.client import Client, ProblemError


LOCAL_SERVICE_URL = "http://127.0.0.1:8787"


@dataclass(frozen=True, slots=True)
class Target:
    """A service's URL and the API token for it. `context` is the context's name, or empty."""

    url: str
    token: str
    context: str = ""


@dataclass(slots=True)
class Contexts:
    """The contents of the configuration file."""

    current: str = ""
    targets: dict[str, Target] = field(default_factory=dict)


def resolve_target(url: str) -> Target:
    """Return the service at `url`, or the service of the current context if `url` is empty.

    Raises:
        InputError: EBBTIDE_CONTEXT names an unknown context, or the configuration file is invalid.
    """
    contexts, token = load_contexts(), os.environ.get("EBBTIDE_TOKEN", "")
    name = os.environ.get("EBBTIDE_CONTEXT", "") or contexts.current
    if name and name not in contexts.targets:
        raise InputError(f"EBBTIDE_CONTEXT: got {name!r}; allowed: {_format_context_names(contexts)}")
    chosen = contexts.targets.get(name, Target(LOCAL_SERVICE_URL, ""))
    is_chosen = not url or url.rstrip("/") == chosen.url.rstrip("/")
    target = Target(chosen.url, token or chosen.token, name) if is_chosen else Target(url, token)
    local = None if target.token else find_local_service(target.url)
    return target if local is None else replace(target, url=local.url, token=local.token)


def get_context(contexts: Contexts, name: str) -> Target:
    """Return the context of this name. Raises InputError if there is none."""
    if name not in contexts.targets:
        raise InputError(f"context: got {name!r}; allowed: {_format_context_names(contexts)}")
    return contexts.targets[name]


def get_config_path() -> Path | None:
    """Return the path of the configuration file, or None if the user has no home directory (in a container)."""
    if given := os.environ.get("XDG_CONFIG_HOME"):
        return Path(given) / "ebbtide" / "config.yaml"
    try:
        return Path.home() / ".config" / "ebbtide" / "config.yaml"
    except RuntimeError:
        return None


def load_contexts() -> Contexts:
    """Read the configuration file. A missing file means no contexts.

    Raises:
        InputError: other users can read the file, or its contents are invalid.
    """
    path = get_config_path()
    if path is None or not path.is_file():
        return Contexts()
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        raise InputError(f"{path} contains tokens, but its mode is {mode:04o}. Run `chmod 600 {path}`.")
    import yaml

    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        entries = document.get("contexts", {}).items()
        targets = {str(name): Target(each["url"], each.get("token", ""), str(name)) for name, each in entries}
        return Contexts(str(document.get("current", "")), targets)
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read ({type(error).__name__}). Delete it and run `ebbtide login` again."
        ) from error


def save_contexts(contexts: Contexts) -> Path:
    """Replace the configuration file atomically and return its path.

    Raises:
        InputError: there is no home directory, or the file cannot be written.
    """
    import yaml

    path = get_config_path()
    if path is None:
        raise InputError(
            "there is no home directory to save contexts in. Set XDG_CONFIG_HOME, or use EBBTIDE_URL and EBBTIDE_TOKEN."
        )
    document = {
        "current": contexts.current,
        "contexts": {name: {"url": each.url, "token": each.token} for name, each in contexts.targets.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mkstemp creates with mode 0600
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yaml.safe_dump(document, file, sort_keys=False)
        Path(temporary).replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def _format_context_names(contexts: Contexts) -> str:
    return ", ".join(sorted(contexts.targets)) or "none; `ebbtide login` creates one"


DEFAULT_URL = ""
"""The current context's service; without a context, LOCAL_SERVICE_URL."""

UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="EBBTIDE_URL",
        help="URL of the service. Default: the current context's service, else a service on this machine.",
        rich_help_panel="Service",
        show_default=False,
    ),
]

_PROBLEM_TYPE = "urn:ebbtide:problem:"
_REMEDIES = {
    401: " (log in with `ebbtide login`, or set EBBTIDE_TOKEN)",
    403: " (`ebbtide whoami` shows your roles; an admin can grant more)",
}


@contextmanager
def service_client(url: str) -> Iterator[Client]:
    """Connect to the service at `url`, or to that of the current context, with its token.

    Raises:
        ServiceError: the service rejected the request, or is unreachable. The exit code says which.
    """
    with target_client(resolve_target(url)) as client:
        yield client


@contextmanager
def target_client(target: Target) -> Iterator[Client]:
    from ebbtide.client import Client, ProblemError, UnreachableError

    try:
        client = Client(target.url, token=target.token)
    except ValueError as error:
        raise InputError(f"--url: {str(error).removeprefix('url: ')}") from error
    try:
        with client:
            yield client
    except ProblemError as problem:
        if not _is_from_ebbtide(problem):
            message = f"{target.url} is not an Ebbtide service: it answered HTTP {problem.status}. Check --url."
            raise ServiceError(message, ExitCode.UNAVAILABLE, problem) from problem
        message = format_problem(problem) + _REMEDIES.get(problem.status, "")
        raise ServiceError(message, choose_exit_code(problem.status), problem) from problem
    except UnreachableError as error:
        message = str(error) if error.advice else f"{error} (start a service with `ebbtide serve`, or set --url)"
        raise ServiceError(message, ExitCode.UNAVAILABLE) from error


def _is_from_ebbtide(problem: ProblemError) -> bool:
    """Return whether Ebbtide answered, or a proxy that says that the service behind it is unavailable."""
    return problem.type.startswith(_PROBLEM_TYPE) or choose_exit_code(problem.status) is ExitCode.UNAVAILABLE


def format_problem(problem: ProblemError) -> str:
    """Return a problem's detail followed by the errors of its fields that the detail does not contain."""
    detail = problem.detail or problem.title or f"HTTP {problem.status}"
    return "; ".join([detail, *(error.message for error in problem.errors if error.message not in detail)])
