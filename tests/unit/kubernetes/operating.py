"""One round of what the operator does with custom resources, without ticks: commands in, steps out."""

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
from tests.unit.kubernetes.pretend_server import BORN_S, PretendServer, obeyed

NOW_S = BORN_S + 600.0
NAMESPACE = "jobs"


@dataclass
class Operating:
    """A cluster, and the state beside it. Commands wait in `inbox` until `absorb`; an id is taken once."""

    server: PretendServer = field(default_factory=PretendServer)
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(now_s=NOW_S))
    inbox: tuple[Command, ...] = ()
    sent: set[str] = field(default_factory=set)
    more: dict[str, Any] = field(default_factory=dict)

    def take(self) -> SpecCommands:
        loaded = LoadedState(self.snapshot, self.inbox)
        return compute_spec_commands(self.server.resources(), loaded, self.snapshot.now_s, job_namespace=NAMESPACE)

    def send(self, *commands: Command) -> list[str]:
        """The kinds of those that were new."""
        new = [command for command in commands if command.id not in self.sent]
        self.sent |= {command.id for command in new}
        self.inbox += tuple(new)
        return [type(command.body).__name__ for command in new]

    def absorb(self) -> None:
        taken = obeyed(self.snapshot, self.inbox)
        self.inbox = ()
        self.snapshot = replace(taken, generation=self.snapshot.generation + 1)

    def steps(self, **more: Any) -> tuple[Writes, ...]:
        """What has to be written; commands that were sent before and do not wait any more count as settled."""
        settled = self.sent - {command.id for command in self.inbox}
        world = PublishState(
            snapshot=self.snapshot,
            now_s=self.snapshot.now_s,
            epoch=3,
            job_namespace=NAMESPACE,
            **{"taken": self.take(), "settled": settled, **self.more, **more},
        )
        return compute_resource_writes(world)

    def publish(self, **more: Any) -> None:
        self.server.do(self.steps(**more))

    def round(self) -> list[str]:
        """Intake, tick, publish; the kinds of the commands that were new."""
        new = self.send(*self.take().commands)
        self.absorb()
        self.publish()
        return new

    def settle(self) -> None:
        """Rounds until nothing is new and nothing is written."""
        for _ in range(10):
            if not self.round() and not self.steps():
                return
        raise AssertionError(f"never quiet: {self.take().commands} {self.steps()}")

    def wait(self, seconds: float) -> None:
        self.snapshot = replace(self.snapshot, now_s=self.snapshot.now_s + seconds)

    def add_node(
        self, name: str, labels: dict[str, str], *, gpus: int = 8, product: str = "NVIDIA-A100-SXM4-80GB", **spec: Any
    ) -> None:
        labels = {**labels, **({GPU_PRODUCT_LABEL: product} if product else {})}
        self.server.add(NODE, name, spec, labels=labels)["status"] = {"allocatable": {GPU_RESOURCE: str(gpus)}}
