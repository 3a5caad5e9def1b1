"""The service's own machine: its registration in the database, and the command line of its node agent."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import make_url

from api.identity.machine_credentials import generate_credential
from api.identity.principals import token_digest
from cli.connection import get_config_path
from scheduler.agent.agent_state import AgentIdentity, read_identity, write_identity
from scheduler.domain.machine import Machine
from scheduler.package_version import get_package_version
from scheduler.settings import Settings
from scheduler.store.api_protocol import MachineNameTakenError, MachineStore
from scheduler.store.sql_store import SqlStore

_SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")


def state_folder(settings: Settings) -> Path:
    """Return the state folder of the agent."""
    return settings.run_dir / "agent"


def register_service_machine(settings: Settings) -> None:
    """Make this machine known as the service's own, with a credential in the state folder of its agent.

    A machine that the database knows keeps its credential: its runs go on.

    Raises:
        ValueError: other machines have its name.
    """
    folder = state_folder(settings)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    identity = read_identity(folder)
    store = SqlStore(settings.database_url)
    try:
        if identity is None or not _is_registered(store.machines, identity):
            identity = _register(store.machines, settings.worker_url)
    finally:
        store.close()
    write_identity(folder, AgentIdentity(identity.machine, (), settings.worker_url, identity.credential))


def build_agent_command(settings: Settings, command: Sequence[str]) -> list[str]:
    """Return the command line of the agent. `command` starts Ebbtide's command line.

    Ranks see neither the service's folders, nor its database, nor the tokens that its user has saved.
    """
    secrets = [settings.token_secret_path, settings.secrets_key_path]
    hidden = [settings.run_dir, settings.archive_path, *secrets, *_list_database_files(settings)]
    if (contexts := get_config_path()) is not None:
        hidden.append(contexts.parent)
    options = [word for path in hidden for word in ("--hide", str(path))]
    return [*command, "agent", "--with-parent", "--state", str(state_folder(settings)), *options]


def _is_registered(machines: MachineStore, identity: AgentIdentity) -> bool:
    stored = machines.find_machine(token_digest(identity.credential))
    return stored is not None and stored.is_service and stored.is_live


def _register(machines: MachineStore, url: str) -> AgentIdentity:
    digest, credential = generate_credential()
    host = socket.gethostname()
    for name in (host, f"{host}-service"):
        machine = Machine(
            name, (), "", "", "127.0.0.1", get_package_version(), time.time(), digest=digest, is_service=True
        )
        try:
            machines.register_service(machine)
        except MachineNameTakenError:
            continue
        return AgentIdentity(name, (), url, credential)
    raise ValueError(f"machines {host} and {host}-service have joined. Remove one with `ebbtide machines remove`.")


def _list_database_files(settings: Settings) -> list[Path]:
    url = make_url(settings.database_url)
    if url.get_backend_name() != "sqlite" or not url.database:
        return []
    return [Path(f"{url.database}{suffix}") for suffix in _SQLITE_SUFFIXES]
