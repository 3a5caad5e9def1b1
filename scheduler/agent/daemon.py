"""Composition of the node agent: joins once, finds earlier runs again, and serves until SIGTERM."""

from __future__ import annotations

import logging
import os
import socket
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.agent.agent_state import AgentIdentity, AgentState, boot_time_s
from scheduler.agent.containment import Containment, ContainmentPolicy
from scheduler.agent.inventory import InventoryOverrides, detect_inventory
from scheduler.agent.joining import join
from scheduler.agent.machine_agent import MachineAgent
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.run_launcher import RunLauncher
from scheduler.agent.run_retention import RetentionLimits, RunRetention
from scheduler.agent.supervised_run import SupervisedRun
from scheduler.domain.machine import MachineInventory
from scheduler.domain.run_document import RunDocument

logger = logging.getLogger(__name__)

_PRELOAD = ("scheduler.trainer.preload",)
_FIRST_LEASE_S = 30.0
"""Ranks of an earlier agent may run at least this long, so that a late restart does not end them at once."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of `ebbtide agent`.

    Args:
        url, token_file: control plane and join token; needed once, before the machine has joined.
        name: name of the machine; empty for its host name.
        gpu: name of the GPU profile; empty to derive it from the inventory.
        address: where ranks on other machines reach this one; empty for the address that reaches the control plane.
        hidden: folders that no rank may see, besides the state folder.
        preload: modules that supervisors load for jobs of the reference trainer.
        retention: how long files of ended runs stay.
    """

    state: Path
    version: str
    url: str = ""
    token_file: Path | None = None
    name: str = ""
    gpu: str = ""
    address: str = ""
    overrides: InventoryOverrides = field(default_factory=lambda: InventoryOverrides())
    policy: ContainmentPolicy = field(default_factory=lambda: ContainmentPolicy())
    hidden: Sequence[Path] = ()
    checkpoint_paths: Sequence[Path] = ()
    preload: Sequence[str] = _PRELOAD
    retention: RetentionLimits = field(default_factory=lambda: RetentionLimits())


def run_agent(options: AgentOptions) -> None:
    """Join if the machine has not joined yet, and serve until SIGTERM. Ranks go on without the agent.

    Raises:
        ValueError: the machine cannot join, or cannot contain its ranks as required.
        OSError: the state folder cannot be written, or the control plane cannot be reached to join.
    """
    os.umask(0o077)
    state = AgentState(options.state)
    containment = Containment.detect(options.policy, hidden=(state.root, *options.hidden))
    logger.info("containment: %s", containment.level)
    inventory = detect_inventory(options.overrides, checkpoint_paths=options.checkpoint_paths)
    identity = state.read_identity() or _join(options, state, str(containment.level), inventory)
    launcher = RunLauncher(state, identity, containment, inventory, preload=options.preload)
    recovered = launcher.recover_runs()
    if recovered:
        state.extend_lease(max(state.read_lease_s(), boot_time_s() + _FIRST_LEASE_S))
    logger.info("machine %s serves %s with %d earlier runs", identity.machine, identity.url, len(recovered))
    retention = RunRetention(
        AgentFolders(state.root), options.retention, delete_unused_directories=launcher.delete_unused_directories
    )

    def prepare(document: RunDocument) -> SupervisedRun:
        with retention.hold(document.job_id):
            return launcher.prepare(document)

    MachineAgent(state, identity, prepare, recovered, retention).serve()


def _join(options: AgentOptions, state: AgentState, level: str, inventory: MachineInventory) -> AgentIdentity:
    if not options.url or options.token_file is None:
        raise ValueError(
            f"--join: {state.root} holds no machine that has joined. Pass --join URL and --token-file FILE; "
            "`ebbtide machines token` creates a token."
        )
    identity = join(
        options.url,
        options.token_file,
        name=options.name or socket.gethostname(),
        gpu=options.gpu,
        address=options.address or _find_address(options.url),
        version=options.version,
        containment=level,
        inventory=inventory,
    )
    state.write_identity(identity)
    return identity


def _find_address(url: str) -> str:
    """Return the address of this machine on the route to the control plane."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "", parts.port or 80))
        address: str = probe.getsockname()[0]
    return address
