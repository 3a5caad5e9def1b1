"""Removal of temporary machines that have left, or were silent for so long that they must be gone, and of their nodes.

It runs in its own thread of the leader, so that no tick waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from scheduler.domain.commands import Command, RemoveNode
from scheduler.domain.machine import Machine
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.clock import Clock
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.protocol import UnavailableError
from scheduler.store.sql_store import SqlStore

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_ACTOR = "controller"


def find_silent_machines(machines: Iterable[Machine], since_s: float) -> list[Machine]:
    """Return the temporary machines without contact after `since_s` that are not revoked yet."""
    temporary = (machine for machine in machines if machine.is_temporary and machine.is_live)
    return [each for each in temporary if (each.joined_at_s if each.seen_at_s is None else each.seen_at_s) < since_s]


def find_removable_nodes(machines: Iterable[Machine], snapshot: Snapshot) -> list[tuple[Machine, str]]:
    """Return the nodes of revoked temporary machines whose GPUs no job holds, with their machine."""
    departed = (machine for machine in machines if machine.is_temporary and not machine.is_live)
    nodes = [(machine, node) for machine in departed for node in machine.nodes if node in snapshot.nodes]
    return [(machine, node) for machine, node in nodes if not snapshot.index.holders.get(node)]


class DepartedMachines:
    """Removes departed machines while this process leads.

    Args:
        epoch: returns the epoch of the lease; 0 while this process does not lead.
        silence_s: time without contact after which a temporary machine is removed.
    """

    def __init__(self, store: SqlStore, *, clock: Clock, epoch: Callable[[], int], silence_s: float) -> None:
        self._store = store
        self._clock = clock
        self._epoch = epoch
        self._silence_s = silence_s
        self._finished = set[str]()

    def step(self) -> None:
        """Revoke silent machines and ask to remove nodes, if this process leads.

        Raises:
            UnavailableError: the database does not respond.
        """
        if self._epoch() == 0:
            return
        now_s, machines = self._clock.now_s(), self._store.machines.list_machines()
        for machine in find_silent_machines(machines, now_s - self._silence_s):
            logger.warning("machine %s is removed: it was silent for %.0f s", machine.name, self._silence_s)
            fields = {"pool": machine.pool, "gpu": machine.gpu, "address": machine.address}
            entry = AuditEntry(now_s, _ACTOR, "", "RevokeMachine", machine.name, fields, None, "")
            self._store.machines.revoke_machine(machine.name, now_s, entry)
        self._remove_nodes([each for each in machines if each.is_temporary and not each.is_live], now_s)

    def _remove_nodes(self, departed: list[Machine], now_s: float) -> None:
        unfinished = [machine for machine in departed if machine.digest not in self._finished]
        if not unfinished:
            return
        snapshot = self._store.load().snapshot
        for machine, node in find_removable_nodes(unfinished, snapshot):
            # The id is that of the machine's credential: the command is sent once, also by two leaders.
            self._store.send(Command(f"departed-{machine.digest[:24]}-{node}", now_s, RemoveNode(node), _ACTOR))
        self._finished |= {each.digest for each in unfinished if snapshot.nodes.keys().isdisjoint(each.nodes)}

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set."""
        while not stop.wait(_PERIOD_S):
            try:
                self.step()
            except UnavailableError:
                continue  # the control loop logs the outage
