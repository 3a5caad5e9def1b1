"""World: the state as one request sees it, and the only way in which a request asks for a change."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from typing import TypeVar

from api.audit import change_entry
from api.errors import conflict, not_found
from api.identity.permits import permit, require
from api.identity.principal import Principal, Role
from api.identity.sight import Sight
from api.present import Present
from api.verdict import is_limited, send_judged
from scheduler.core.commands import obey
from scheduler.core.intake import Intake
from scheduler.domain.command import Command, CommandBody
from scheduler.domain.event import EventCode
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.store.front import FrontStore

V = TypeVar("V")
_JOB_ID = re.compile(r"[a-z0-9][-a-z0-9]{0,79}", re.ASCII)


@dataclass(frozen=True, slots=True)
class World:
    """`committed` is the newest snapshot; `snapshot` has the commands in it that still wait in the inbox.

    So whoever has submitted a job or registered a node finds it at once, though no tick has seen it yet. `principal` is
    who asks, and is named by what is sent.
    """

    store: FrontStore
    principal: Principal
    now_s: float
    committed: Snapshot
    snapshot: Snapshot
    present: Present

    @property
    def sight(self) -> Sight:
        return Sight(self.principal, self.snapshot, self.store.ended_job)

    def redacted(self, view: V) -> V:
        """`view` (plain JSON) without the ids of jobs that the principal may not see."""
        told: V = self.sight.redacted(view)
        return told

    def require(self, role: Role, queue: str = "") -> None:
        """Raises a 403 problem for who does not have `role` on `queue` (everywhere where it is empty)."""
        require(self.principal, role, queue)

    def job(self, job_id: str) -> Job:
        """A live or ended job, or a 404 problem, also where it may not be read."""
        job = self.snapshot.jobs.get(job_id)
        if job is None and _JOB_ID.fullmatch(job_id):
            job = self.store.ended_job(job_id)
        return job if job is not None and self.sight.job(job) else not_found("job", job_id)

    def shown(self, job: Job) -> Job:
        """The job with what the principal may see of its message."""
        return self.sight.shown(job)

    def live_job(self, job_id: str) -> Job:
        """A job that can still change, or a problem: 404, or 409 for one that has ended."""
        job = self.job(job_id)
        if job.is_ended:
            conflict(f"job {job.id} has ended: it {_PAST.get(job.state, job.state)}")
        return job

    def pool(self, name: str) -> Pool:
        return self.snapshot.pools.get(name) or not_found("pool", name, self.snapshot.pools)

    def node(self, name: str) -> Node:
        return self.snapshot.nodes.get(name) or not_found("node", name, self.snapshot.nodes)

    def send(self, body: CommandBody, *, at_s: float | None = None, basis: str = "") -> World:
        """Puts a command into the inbox and gives the world as it will be once that is absorbed.

        A command that the core would refuse in the present state is a 409 problem, one that the principal may not ask
        for is a 403 problem; neither is sent. Whoever was faster with what `basis` was read of makes it a 412 problem.
        """
        command = new_command(body, self.now_s if at_s is None else at_s, actor=self.principal.name)
        after = self._sent(replace(command, basis=basis))
        assert after is not None, "an id of its own"
        return after

    def send_once(self, body: CommandBody, command_id: str) -> World | None:
        """As `send`; None where a command of this id was sent before, and then nothing is sent."""
        return self._sent(new_command(body, self.now_s, actor=self.principal.name, command_id=command_id))

    def _sent(self, command: Command) -> World | None:
        permit(self.principal, command.body, self.snapshot)
        intake = Intake(self.snapshot)
        obey(intake, command)
        for event in intake.events:
            if event.code is EventCode.COMMAND_REFUSED:
                conflict(event.message)
        after = intake.view()
        audit = change_entry(command, self.principal, self.snapshot, after)
        is_new = send_judged(self.store, command, audit=audit, limited=is_limited(command, self.snapshot))
        return replace(self, snapshot=after) if is_new else None


_PAST = {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}


def load_world(present: Present, store: FrontStore, now_s: float, principal: Principal) -> World:
    shown = present.look(now_s)
    at_s = max(now_s, shown.snapshot.now_s)
    return World(store, principal, at_s, shown.committed, replace(shown.snapshot, now_s=at_s), present)


def new_command(body: CommandBody, at_s: float, *, actor: str, command_id: str = "") -> Command:
    """`command_id` makes the command idempotent; without one it is unique."""
    return Command(command_id or f"api-{secrets.token_hex(12)}", at_s, body, actor, is_counted=True)
