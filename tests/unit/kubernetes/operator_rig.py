"""A rig for one reconcile round without ticks: specs in, writes out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.domain.commands import Command
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import GPU_PRODUCT_LABEL, GPU_RESOURCE, NODE
from scheduler.kubernetes.resource_sync import compute_resource_writes
from scheduler.kubernetes.resource_writes import PublishState, Writes
from scheduler.kubernetes.spec_commands import SpecCommands, compute_spec_commands
from scheduler.store.protocol import LoadedState
from tests.unit.kubernetes.fake_server import CREATED_S, FakeServer, apply_commands

NOW_S = CREATED_S + 600.0
NAMESPACE = "jobs"


@dataclass
class OperatorRig:
    """A cluster and its store. Commands wait in `inbox` until `apply_inbox`; each id is accepted once."""

    server: FakeServer = field(default_factory=FakeServer)
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(now_s=NOW_S))
    inbox: tuple[Command, ...] = ()
    sent: set[str] = field(default_factory=set)
    more: dict[str, Any] = field(default_factory=dict)

    def compute_commands(self) -> SpecCommands:
        loaded = LoadedState(self.snapshot, self.inbox)
        return compute_spec_commands(self.server.resources(), loaded, self.snapshot.now_s, job_namespace=NAMESPACE)

    def send(self, *commands: Command) -> list[str]:
        """Add new commands to the inbox and return their kinds."""
        new = [command for command in commands if command.id not in self.sent]
        self.sent |= {command.id for command in new}
        self.inbox += tuple(new)
        return [type(command.body).__name__ for command in new]

    def apply_inbox(self) -> None:
        applied = apply_commands(self.snapshot, self.inbox)
        self.inbox = ()
        self.snapshot = replace(applied, generation=self.snapshot.generation + 1)

    def compute_writes(self, **more: Any) -> tuple[Writes, ...]:
        """Return the writes. Commands that were sent and have left the inbox count as applied."""
        applied = self.sent - {command.id for command in self.inbox}
        state = PublishState(
            snapshot=self.snapshot,
            now_s=self.snapshot.now_s,
            epoch=3,
            job_namespace=NAMESPACE,
            **{"spec_commands": self.compute_commands(), "applied_command_ids": applied, **self.more, **more},
        )
        return compute_resource_writes(state)

    def write(self, **more: Any) -> None:
        self.server.execute(self.compute_writes(**more))

    def run_round(self) -> list[str]:
        """Send commands, apply them, write resources. Return the kinds of new commands."""
        new = self.send(*self.compute_commands().commands)
        self.apply_inbox()
        self.write()
        return new

    def run_until_stable(self) -> None:
        """Run rounds until there are no new commands and no writes."""
        for _ in range(10):
            if not self.run_round() and not self.compute_writes():
                return
        raise AssertionError(f"not stable after 10 rounds: {self.compute_commands().commands} {self.compute_writes()}")

    def advance(self, seconds: float) -> None:
        self.snapshot = replace(self.snapshot, now_s=self.snapshot.now_s + seconds)

    def add_node(
        self, name: str, labels: dict[str, str], *, gpus: int = 8, product: str = "NVIDIA-A100-SXM4-80GB", **spec: Any
    ) -> None:
        labels = {**labels, **({GPU_PRODUCT_LABEL: product} if product else {})}
        self.server.add(NODE, name, spec, labels=labels)["status"] = {"allocatable": {GPU_RESOURCE: str(gpus)}}
