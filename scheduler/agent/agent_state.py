"""The state folder of a node agent: its identity, its credential, and the lease of its ranks.

<state>/agent.lock        held while an agent uses the folder
<state>/identity.json     name of the machine, URL of the control plane, credential; readable by the agent alone
<state>/stated.json       what the operator has stated of the machine, for later starts
<state>/epoch             highest leader epoch that was seen
<state>/lease             time on the boot clock until which ranks may run without contact to the control plane
<state>/jobs/             run folders (see run_folder)
<state>/directories/      unpacked working directories
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from scheduler.agent.shared_files import read_json, write_json
from scheduler.domain.codec import decode_stored

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 8.0
"""Time that an earlier agent has to end, which may still send its last report."""
_LOCK_POLL_S = 0.05
_LEASE_FORMAT = "{:020.3f}\n"


@dataclass(frozen=True, slots=True)
class StatedFacts:
    """What the operator states of a machine instead of the driver and the network. Empty values are not stated.

    Args:
        gpu: profile or product.
    """

    gpus: int = 0
    gpu: str = ""
    gpu_memory_bytes: int = 0
    address: str = ""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """A machine that has joined. `credential` authenticates its reports."""

    machine: str
    nodes: tuple[str, ...]
    url: str
    credential: str = field(repr=False)

    @property
    def report_path(self) -> str:
        return f"/v1/machines/{quote(self.machine, safe='')}/report"

    def archive_path(self, digest: str, job_id: str) -> str:
        del job_id  # the credential is good for all jobs of the machine
        return f"/v1/archives/{digest}"

    def read_token(self) -> str:
        return self.credential

    def describe_agent(self) -> Mapping[str, Any]:
        """Return no fields: a machine states its facts at each start of its agent."""
        return {}


def read_identity(folder: Path) -> AgentIdentity | None:
    """Return the identity in a state folder, or None before the machine has joined.

    Raises:
        ValueError: the file is damaged; the message says what to do.
    """
    return _read(
        folder / "identity.json",
        AgentIdentity,
        "Restore it from a backup. Or remove the machine (`ebbtide machines remove`) and the file, and start the agent "
        "with --join and --token-file. For the agent of `ebbtide serve`, removing the file is enough",
    )


def write_identity(folder: Path, identity: AgentIdentity) -> None:
    write_json(folder / "identity.json", asdict(identity), durable=True)


class AgentState:
    """The state folder of one agent.

    Raises:
        ValueError: another agent uses the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.root / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(self._lock, within_s=_LOCK_TIMEOUT_S):
            raise ValueError(
                f"--state: {self.root} is in use by another agent. Stop that one first, or choose another folder."
            )
        remedy = "Remove the file while no more than one controller runs: the next reply tells the agent the epoch"
        self._highest_epoch = _read(self.root / "epoch", int, remedy) or 0
        self._lease = os.open(self.lease_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def lease_path(self) -> Path:
        return self.root / "lease"

    def read_identity(self) -> AgentIdentity | None:
        """Return the identity, or None before the machine has joined."""
        return read_identity(self.root)

    def write_identity(self, identity: AgentIdentity) -> None:
        write_identity(self.root, identity)

    def complete(self, stated: StatedFacts) -> StatedFacts:
        """Return the stated facts, with those of earlier starts where nothing is stated now.

        Raises:
            ValueError: the file of earlier starts is damaged; the message says what to do.
        """
        remedy = "Remove it, and state --gpus, --gpu, --gpu-memory and --address once more where they are needed"
        earlier = _read(self.root / "stated.json", StatedFacts, remedy) or StatedFacts()
        return StatedFacts(**{name: value or getattr(earlier, name) for name, value in asdict(stated).items()})

    def write_stated(self, stated: StatedFacts) -> None:
        write_json(self.root / "stated.json", asdict(stated), durable=True)

    def extend_lease(self, until_s: float) -> None:
        """Allow ranks to run until `until_s` on the boot clock. Written in place: containers see the same file."""
        os.pwrite(self._lease, _LEASE_FORMAT.format(until_s).encode(), 0)

    def accept_epoch(self, epoch: int) -> bool:
        """Return whether no later leader was seen, and remember the epoch durably.

        On a full or read-only disk, the epoch is remembered until the agent ends: ranks must not end with their lease.
        """
        if epoch > self._highest_epoch:
            try:
                write_json(self.root / "epoch", epoch, durable=True)
            except OSError as error:
                logger.warning("leader epoch %d cannot be recorded: %s", epoch, error)
            self._highest_epoch = epoch
        return epoch >= self._highest_epoch


def _read(path: Path, kind: type[T], remedy: str) -> T | None:
    """Read a file of the state folder. None if it does not exist. A later version may have written more fields.

    Raises:
        ValueError: it is damaged; the message names it and the remedy.
    """
    try:
        file = read_json(path)
        return None if file is None else decode_stored(kind, file.document)
    except ValueError as error:
        cause = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"--state: {path} is damaged: {cause}. {remedy}.") from None


def _lock(descriptor: int, *, within_s: float) -> bool:
    """Return whether the file could be locked within this time."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_LOCK_POLL_S)
        else:
            return True
