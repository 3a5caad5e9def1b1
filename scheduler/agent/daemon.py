"""Composition of the node agent: joins once, finds earlier runs again, and serves until SIGTERM."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scheduler.agent.agent_state import AgentIdentity, AgentState, StatedFacts
from scheduler.agent.containment import Containment, ContainmentPolicy, LevelName
from scheduler.agent.control_plane_identity import ControlPlaneIdentity, RankOutput
from scheduler.agent.departure import Departure
from scheduler.agent.inventory import InventoryOverrides, detect_inventory
from scheduler.agent.joining import AgentFacts, join, leave, send_facts
from scheduler.agent.log_shipper import LogShipper
from scheduler.agent.machine_agent import MachineAgent
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.run_launcher import RunLauncher
from scheduler.agent.run_retention import RetentionLimits, RunRetention
from scheduler.agent.supervised_run import SupervisedRun
from scheduler.domain.run_document import RunDocument

logger = logging.getLogger(__name__)

PRELOAD = ("scheduler.trainer.preload",)
"""Modules that supervisors load for jobs of the reference trainer."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of `ebbtide agent`.

    Args:
        url, token_file: control plane and join token; needed once, before the machine has joined.
        name: name of the machine; empty for its host name.
        address: where ranks on other machines reach this one; empty for the address that reaches the control plane.
        hidden: folders that no rank may see, besides the state folder.
        preload: modules that supervisors load for jobs of the reference trainer.
        retention: how long files of ended runs stay.
        leave_within_s: time that ranks have to save and exit once the agent is asked to stop. None: they go on.
        departure: says when the machine leaves for good. None: it stays.
        granted_gpus: driver indices of the GPUs that the agent may offer. None: all.
    """

    state: Path
    version: str
    url: str = ""
    token_file: Path | None = None
    name: str = ""
    address: str = ""
    overrides: InventoryOverrides = field(default_factory=lambda: InventoryOverrides())
    policy: ContainmentPolicy = field(default_factory=lambda: ContainmentPolicy())
    hidden: Sequence[Path] = ()
    checkpoint_paths: Sequence[Path] = ()
    preload: Sequence[str] = PRELOAD
    retention: RetentionLimits = field(default_factory=lambda: RetentionLimits())
    leave_within_s: float | None = None
    departure: Departure | None = None
    granted_gpus: tuple[int, ...] | None = None


def run_agent(options: AgentOptions) -> None:
    """Join if the machine has not joined yet, else state its facts again, and serve until SIGTERM.

    What the operator stated at an earlier start counts until it is stated anew.

    Raises:
        ValueError: the machine is refused, or cannot contain its ranks as required.
        OSError: the state folder cannot be written, or the control plane cannot be reached to join.
    """
    os.umask(0o077)
    state = AgentState(options.state)
    containment = Containment.detect(options.policy, hidden=(state.root, *options.hidden))
    is_contained = containment.level.name is not LevelName.NONE
    logger.log(logging.INFO if is_contained else logging.WARNING, "containment: %s", containment.level)
    given = StatedFacts(**asdict(options.overrides), address=options.address)
    identity = state.read_identity()
    stated = given if identity is None else state.complete(given)
    state.write_stated(stated)
    overrides = InventoryOverrides(stated.gpus, stated.gpu, stated.gpu_memory_bytes)
    inventory = detect_inventory(
        overrides, checkpoint_paths=options.checkpoint_paths, granted_gpus=options.granted_gpus
    )
    facts = AgentFacts(stated.gpu, stated.address, options.version, str(containment.level), inventory)
    if identity is None:
        identity = _join(options, state, facts)
    elif problem := send_facts(identity, facts):
        logger.warning("%s", problem)
    launcher = RunLauncher(state, identity, containment, inventory, preload=options.preload)
    output = LogShipper(identity, AgentFolders(state.root).list_folders())
    build_agent(
        state,
        identity,
        launcher,
        output=output,
        limits=options.retention,
        leave_within_s=options.leave_within_s,
        departure=options.departure,
    ).serve()
    if options.departure is not None and (problem := leave(identity)):
        logger.warning("the machine could not say that it has left, and is removed later: %s", problem)


def build_agent(
    state: AgentState,
    identity: ControlPlaneIdentity,
    launcher: RunLauncher,
    *,
    output: RankOutput,
    limits: RetentionLimits,
    leave_within_s: float | None,
    departure: Departure | None = None,
) -> MachineAgent:
    """Return the agent with the runs of earlier agents in this state folder. Call it from the main thread."""
    recovered = launcher.recover_runs()
    logger.info("serving %s with %d earlier runs", identity.url, len(recovered))
    retention = RunRetention(
        AgentFolders(state.root), limits, delete_unused_directories=launcher.delete_unused_directories
    )

    def prepare(document: RunDocument, cancelled: threading.Event) -> SupervisedRun:
        with retention.hold(document.job_id):
            return launcher.prepare(document, cancelled)

    return MachineAgent(
        state,
        identity,
        prepare,
        recovered,
        retention,
        output=output,
        leave_within_s=leave_within_s,
        departure=departure,
    )


def _join(options: AgentOptions, state: AgentState, facts: AgentFacts) -> AgentIdentity:
    if not options.url or options.token_file is None:
        raise ValueError(
            f"--join: {state.root} holds no machine that has joined. Pass --join URL and --token-file FILE; "
            "`ebbtide machines token` creates a token."
        )
    identity = join(
        options.url,
        options.token_file,
        name=options.name or socket.gethostname(),
        facts=facts,
        is_temporary=options.departure is not None,
    )
    state.write_identity(identity)
    return identity
