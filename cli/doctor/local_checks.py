"""Checks of this machine: settings, files, ports and the containment of ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cli.local_service import TOKEN_FILE
from cli.service_settings import PREFIX, InvalidSettingsError, find_auth_problem, find_other_users, load_settings
from scheduler.domain.suggestions import suggest
from scheduler.settings import Settings
from scheduler.token_secret import SECRET_BYTES

OTHER_VARIABLES = frozenset(
    {"EBBTIDE_URL", "EBBTIDE_TOKEN", "EBBTIDE_CONTEXT", "EBBTIDE_JOIN_TOKEN", "EBBTIDE_TOKEN_FILE", "EBBTIDE_RUN_ROOT"}
)
"""Variables of the command line and of agents in pods, which are not settings of the service."""
OTHER_PREFIXES = ("EBBTIDE_AGENT_",)
"""Prefixes of the options of agents."""
_OTHERS_MASK = 0o077
_OTHERS_WRITE_MASK = 0o022
_TIMEOUT_S = 2.0


class CheckState(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a check. `remedy` is what to do, empty if there is nothing to do."""

    name: str
    state: CheckState
    message: str
    remedy: str = ""


def passed(name: str, message: str) -> Check:
    return Check(name, CheckState.OK, message)


def warned(name: str, message: str, remedy: str) -> Check:
    return Check(name, CheckState.WARNING, message, remedy)


def failed(name: str, message: str, remedy: str) -> Check:
    return Check(name, CheckState.FAILURE, message, remedy)


def list_setting_variables() -> list[str]:
    """Return the environment variables of all settings."""
    return [PREFIX + name.upper() for name in Settings.model_fields]


def find_unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield each EBBTIDE_ variable that no part of Ebbtide reads, in order."""
    known = {*list_setting_variables(), *OTHER_VARIABLES}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and not name.startswith(OTHER_PREFIXES):
            yield name


def check_variables(environment: Mapping[str, str]) -> Iterator[Check]:
    """Find variables that have no effect, and settings with invalid values."""
    known = list_setting_variables()
    unknown = list(find_unknown_variables(environment))
    for name in unknown:
        message = f"{name} is not a setting and has no effect{suggest(name, known, prefix=PREFIX)}"
        yield failed("settings", message, f"correct or remove {name}")
    try:
        load_settings()
    except InvalidSettingsError as error:
        for each in error.problems:
            yield failed("settings", f"{each.variable}: {each.message}", f"correct {each.variable}")
        return
    if not unknown:
        given = sum(name in environment for name in known)
        yield passed("settings", f"{given} of {len(known)} settings are set, all valid")


def check_authentication(settings: Settings) -> Check:
    """Check, as `ebbtide serve` does, who has full access if authentication is off."""
    if problem := find_auth_problem(settings):
        return failed("authentication", problem, "set EBBTIDE_AUTH to on, or EBBTIDE_HOST to a loopback address")
    if names := find_other_users(settings):
        message = f"authentication is off, and {names} can log in to this machine and have full access"
        return failed("authentication", message, "remove EBBTIDE_AUTH=off; your own commands need no login")
    if settings.auth != "on":
        return warned("authentication", f"EBBTIDE_AUTH is {settings.auth}", "set it to on")
    return passed("authentication", "authentication is on")


def check_policy(settings: Settings) -> Check:
    from scheduler.scheduling.policy_sets import load_policy_set
    from scheduler.solver.profiles.catalog import read_profiles_folder

    try:
        load_policy_set(settings.policy)
        if settings.profiles_dir is not None:
            read_profiles_folder(settings.profiles_dir)
    except ValueError as error:
        return failed("policy", str(error), "correct EBBTIDE_POLICY or EBBTIDE_PROFILES_DIR")
    return passed("policy", f"policy {settings.policy} and all profiles can be loaded")


def check_files(settings: Settings) -> Iterator[Check]:
    """Check folders and secrets: their owner alone may write them, and nobody else may read secrets."""
    yield _check_folder("run directory", settings.run_dir)
    if settings.archive_dir is not None:
        yield _check_folder("archive directory", settings.archive_dir)
    yield check_secret("token secret", settings.token_secret_path, bytes_min=SECRET_BYTES)
    creates = settings.secrets_key_file is None
    yield check_secret("master key of secrets", settings.secrets_key_path, bytes_min=SECRET_BYTES, is_created=creates)
    yield check_secret("token of the local user", settings.run_dir / TOKEN_FILE, bytes_min=1)


def check_private_file(name: str, path: Path) -> Check:
    """Check that only the owner of a file may read it, and that this user can."""
    mode = path.stat().st_mode & 0o777
    if mode & _OTHERS_MASK:
        return failed(name, f"{path} has mode {mode:04o}: other users can read it", f"chmod 0600 {path}")
    if not os.access(path, os.R_OK | os.W_OK):
        return failed(
            name, f"this user cannot read and write {path}", f"run as the user of the service, or chown {path}"
        )
    return passed(name, f"{path} has mode {mode:04o}")


def check_secret(name: str, path: Path, *, bytes_min: int, is_created: bool = True) -> Check:
    if not path.exists() and not is_created:
        return failed(name, f"{path} does not exist", "create it, the same for all API processes, with mode 0600")
    if not path.exists():
        return passed(name, f"{path} does not exist; the service creates it")
    check = check_private_file(name, path)
    if check.state is CheckState.OK and (size := path.stat().st_size) < bytes_min:
        remedy = f"delete {path}, so that the service creates a new one"
        return failed(name, f"{path} has {size} bytes, {bytes_min} are needed", remedy)
    return check


def _check_folder(name: str, path: Path) -> Check:
    if not path.exists():
        return passed(name, f"{path} does not exist; the service creates it")
    mode = path.stat().st_mode & 0o777
    if not path.is_dir():
        return failed(name, f"{path} is not a directory", "move the file away")
    if mode & _OTHERS_WRITE_MASK:
        return failed(name, f"{path} has mode {mode:04o}: other users can write to it", f"chmod go-w {path}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return failed(name, f"this user cannot write to {path}", f"run as the user of the service, or chown {path}")
    return passed(name, f"{path} has mode {mode:04o}")


def check_ports(settings: Settings, answers: Callable[[str], bool]) -> Iterator[Check]:
    """Check that the ports are free, or that Ebbtide itself uses them. `answers` requests a path of the service."""
    ports = {"API port": settings.port, "probe port": settings.probe_port}
    for name, port in ports.items():
        if port:
            yield _check_port(name, settings.host, port, answers)


def _check_port(name: str, host: str, port: int, answers: Callable[[str], bool]) -> Check:
    where = f"{host}, port {port}"
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return passed(name, f"{where} is free")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
    if answers(f"http://{f'[{host}]' if ':' in host else host}:{port}/healthz"):
        return passed(name, f"Ebbtide answers on {where}")
    return failed(name, f"cannot listen on {where}: {reason}", "set another port, or stop the program that uses it")


def answers_health(url: str) -> bool:
    """Return whether a service of Ebbtide answers at this URL of its health check."""
    import httpx

    try:
        document = httpx.get(url, timeout=_TIMEOUT_S, trust_env=False).json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False
    return isinstance(document, dict) and document.get("status") == "ok"


def check_containment(settings: Settings) -> Check:
    """Start a container as the node agent of this machine does, and report what it does not enforce."""
    from scheduler.agent.containment import Containment, ContainmentPolicy, LevelName

    try:
        level = Containment.detect(ContainmentPolicy(), hidden=[settings.run_dir]).level
    except (ValueError, OSError) as error:
        return warned("containment", f"cannot be determined: {error}", "create the user that ranks run as")
    if level.name is LevelName.FULL:
        return passed("containment", f"level {level} on this machine")
    remedy = (
        "install bubblewrap and delegate control groups, see docs/how-to/add-machines.md; ignore this where no jobs run"
    )
    return warned("containment", f"level {level} on this machine", remedy)
