"""AgentExecutor: runs jobs on machines with node agents, which report over the API.

The executor writes what may start and what must end to the run log; the API hands it to the agents. So controller, API
and agents restart independently, and none of them restarts a rank.

An agent prepares a generation as soon as it is decided: supervisors load, and the node of rank 0 reserves a port. The
generation begins when every node has prepared it and no older rank lives. An agent that lost contact ends its ranks
after `disconnect_s`; the executor counts them as lost only CONTACT_MARGIN_S later, so that two generations of a job
never run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from scheduler.domain.job import Job
from scheduler.domain.machine import Machine, has_devices_for, host_declared_nodes
from scheduler.domain.observation import BegunRun, Observation, Run, RunPhase
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.inference_placement import place_inference, plan_engine_orders
from scheduler.executors.reported_runs import AgentKey, describe_setups
from scheduler.executors.run_ledger import STARTABLE_STATES, RunLedger
from scheduler.executors.standby_replicas import StandbyReplicas

logger = logging.getLogger(__name__)

UNREACHABLE_S = 30.0
"""A machine that has not reported for this long is down, unless ranks may still run there."""
CONTACT_MARGIN_S = 12.0
"""Delay of recorded contacts behind real ones, and the time that the end of ranks takes."""

TRANSITION_PERIOD_S = 0.2
"""Time between two observations while a job starts or changes its GPUs."""
_AGENT_ID_LENGTH = 16


class MachineDirectory(Protocol):
    """The machines that have joined. See scheduler.store."""

    def list_machines(self) -> tuple[Machine, ...]:
        """Return all machines by name, including revoked ones."""


class AgentExecutor:
    """Executor on machines with node agents. Ranks of a machine without contact for `disconnect_s` end.

    `standby` puts engines of inference to sleep on lent machines, at URLs that their pool names.
    """

    def __init__(
        self,
        ledger: RunLedger,
        machines: MachineDirectory,
        *,
        now: Callable[[], float],
        disconnect_s: float,
        standby: StandbyReplicas | None = None,
    ) -> None:
        self._ledger = ledger
        self._machines = machines
        self._now = now
        self._lost_after_s = disconnect_s + CONTACT_MARGIN_S
        self._standby = standby or StandbyReplicas()
        self._desired = Snapshot()
        self._down: Collection[str] = ()
        self._converged_generation = 0
        self._observed_at_s = float("-inf")

    def observe(self) -> Observation:
        """Observe runs and nodes. Also records ended runs and kill orders, where agents read them.

        A node without a machine that reports is down once no rank can be alive there. Before that, its jobs must not
        move: after an outage of the API or the database, all machines seem to have been silent. A declared node whose
        devices the service's own machine lacks is down, too: its jobs would run there on other devices.

        Raises:
            FencedError: a newer leader has written.
        """
        now_s, machines = self._now(), self._list_hosts()
        self._observed_at_s = now_s
        runs = self._ledger.update_runs(
            lambda begun: find_agents(machines, begun, now_s - self._lost_after_s), self._desired.jobs, now_s
        )
        reachable = {
            node for machine in machines if is_reachable(machine, now_s) for node in self._list_usable_nodes(machine)
        }
        known = tuple(run for job_runs in runs.values() for run in job_runs)
        occupied = {node for run in known for node in run.gpus}
        known += tuple(self._list_setups({(run.job_id, run.generation) for run in known}))
        self._down = self._desired.nodes.keys() - reachable - occupied
        facts = place_inference(self._desired, down=self._down, standby=self._standby.list_facts(now_s))
        return Observation(now_s, self._converged_generation, known, facts)

    def converge(self, desired: Snapshot) -> None:
        """Begin the generations that every node has prepared. Ignores states older than the last one.

        Raises:
            FencedError: a newer leader has written; the remaining steps were not taken.
        """
        if desired.generation < self._converged_generation:
            logger.warning(
                "ignoring snapshot generation %d: generation %d is already applied",
                desired.generation,
                self._converged_generation,
            )
            return
        self._desired = desired
        self._standby.follow(plan_engine_orders(desired, down=self._down), self._now())
        begun = self._ledger.list_begun_runs()
        self._begin_generations(desired, begun)
        self._ledger.prune(desired, begun)
        self._converged_generation = desired.generation

    def has_pending_changes(self) -> bool:
        """Return whether a job changes its GPUs, or an engine its sleep, so that a tick should follow soon."""
        if self._standby.has_news():
            return True
        if self._now() - self._observed_at_s < TRANSITION_PERIOD_S:
            return False
        jobs, index = self._desired.jobs, self._desired.index
        return bool(index.releasing) or any(jobs[job_id].state in STARTABLE_STATES for job_id in index.unsettled)

    def close(self) -> None:
        """Stop giving orders to engines. Agents keep their ranks, so that training continues without a leader."""
        self._standby.close()

    def _list_setups(self, begun: Collection[tuple[str, int]]) -> Iterator[Run]:
        """Yield generations that have not begun, because machines run the setup command of their jobs."""
        jobs = [
            job
            for job in map(self._desired.jobs.__getitem__, sorted(self._desired.index.unsettled))
            if job.spec.program.setup and job.state in STARTABLE_STATES
            if (job.id, job.allocation.generation) not in begun
        ]
        reports = self._ledger.list_reports() if jobs else ()
        for job in jobs:
            if reason := describe_setups(job, reports):
                yield Run(job.id, job.allocation.generation, RunPhase.STARTING, reason=reason)

    def _list_hosts(self) -> tuple[Machine, ...]:
        return host_declared_nodes(self._machines.list_machines(), self._desired.nodes)

    def _list_usable_nodes(self, machine: Machine) -> Iterable[str]:
        """Return the nodes of a machine on which a run may begin."""
        if not machine.is_service:
            return machine.nodes
        return [node for node in machine.nodes if has_devices_for(machine, self._desired.nodes[node])]

    def _begin_generations(self, desired: Snapshot, begun: Sequence[BegunRun]) -> None:
        now_s = self._now()

        def find_reachable(jobs: Iterable[Job]) -> Mapping[AgentKey, str]:
            machines = [machine for machine in self._list_hosts() if is_reachable(machine, now_s)]
            by_node = {node: agent_id(machine) for machine in machines for node in self._list_usable_nodes(machine)}
            return {(job.id, node): by_node[node] for job in jobs for node in job.allocation.target if node in by_node}

        self._ledger.begin_generations(desired, begun, find_reachable, now_s)


def agent_id(machine: Machine) -> str:
    """Return the id of the machine's agent. A machine that joins again is another agent."""
    return machine.digest[:_AGENT_ID_LENGTH]


def last_contact_s(machine: Machine) -> float:
    return machine.joined_at_s if machine.seen_at_s is None else machine.seen_at_s


def is_reachable(machine: Machine, now_s: float) -> bool:
    return machine.is_live and now_s - last_contact_s(machine) < UNREACHABLE_S


def find_agents(machines: Iterable[Machine], begun: Iterable[BegunRun], since_s: float) -> Mapping[AgentKey, str]:
    """Return the agents of begun runs, by job and node, of machines that had contact after `since_s`.

    Ranks of other machines have ended.
    """
    by_node = {
        node: agent_id(machine) for machine in machines if last_contact_s(machine) > since_s for node in machine.nodes
    }
    return {(run.job_id, node): by_node[node] for run in begun for node in run.gpus if node in by_node}
