"""RecordingExecutor: writes down what it was asked to do and does nothing. For dry runs and tests."""

from __future__ import annotations

from scheduler.domain.fleet import NodeState
from scheduler.domain.loan import LoanState
from scheduler.domain.observation import NodeFacts, Observation, Run, RunPhase
from scheduler.domain.snapshot import Snapshot


class RecordingExecutor:
    """Observes a world exactly as the last desired state has it: every job runs on its target, whatever had to
    leave has left, inference has left the nodes that were offered. `converged` holds each state it was given."""

    def __init__(self, world: Snapshot | None = None) -> None:
        self.converged: list[Snapshot] = []
        self._world = world or Snapshot()

    def observe(self) -> Observation:
        world = self._world
        runs = tuple(
            Run(job.id, job.allocation.generation, RunPhase.RUNNING, job.allocation.target)
            for job in world.jobs.values()
            if job.allocation.target
        )
        nodes = {
            node.name: NodeFacts(
                up=node.state is NodeState.UP,
                inference_gpus=0 if _is_on_loan(world, node.name) else node.inference_gpus,
                other_gpus=node.other_gpus,
            )
            for node in world.nodes.values()
        }
        return Observation(world.now_s, world.generation, runs, nodes)

    def converge(self, desired: Snapshot) -> None:
        self.converged.append(desired)
        self._world = desired

    def close(self) -> None:
        """There is nothing to end."""


def _is_on_loan(world: Snapshot, node: str) -> bool:
    loan = world.loans.get(node)
    return loan is not None and loan.state in (LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED)
