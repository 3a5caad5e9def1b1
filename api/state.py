"""Present: the state as of now, kept up in one process for all of its requests.

A request sees whatever was committed or sent before it came, through whichever process: each asks the database. But it
shares the asking with others that came meanwhile, and only what is new is read, decoded and obeyed.

Verdict: whether a command with a precondition, once sent, was refused after all because somebody was faster.

What the asker saw fitted, or the command would not have been sent; others may have sent theirs meanwhile, through this
process or another. So the inbox is looked at again, in its order, and where a tick was here already, what that told.

World: the state as one request sees it, and the only way in which a request asks for a change.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from api.http.errors import ProblemError, raise_conflict, raise_not_found
from api.identity.audit import command_audit_entry
from api.identity.authorization import Visibility, authorize_command, require_role
from api.identity.principals import Principal, Role
from scheduler.domain.commands import ChangeJob, Command, CommandBody, SubmitJob
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.job import Job, JobSpec
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.commands import apply_command
from scheduler.scheduling.mutable_snapshot import SnapshotBuilder
from scheduler.store.api_protocol import ApiStore, AuditEntry
from scheduler.store.protocol import LoadedState, Page, Store


@dataclass(frozen=True, slots=True)
class CurrentState:
    """`committed` is the newest snapshot; `snapshot` has the commands in it that still wait in the inbox."""

    committed: Snapshot
    snapshot: Snapshot
    applied: tuple[Command, ...] = ()


class StateReader:
    """Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_lock = threading.Lock()
        self._reads_started = 0
        self._state_read_number = 0  # the look, by number, that `_shown` comes from
        self._state = CurrentState(Snapshot(), Snapshot())

    def read(self, now_s: float) -> CurrentState:
        """The state with everything in it that was there when this was called. Raises UnavailableError."""
        came = self._reads_started
        with self._read_lock:
            if self._state_read_number <= came:  # no look has begun since, and ended
                self._reads_started += 1
                self._state = _advance(self._state, self._store.load(), now_s)
                self._state_read_number = self._reads_started
            return self._state


def _advance(state: CurrentState, loaded: LoadedState, now_s: float) -> CurrentState:
    known = len(state.applied)
    if loaded.snapshot is state.committed and loaded.inbox[:known] == state.applied:
        if len(loaded.inbox) == known:
            return state
        return CurrentState(loaded.snapshot, _apply_commands(state.snapshot, loaded.inbox[known:], now_s), loaded.inbox)
    return CurrentState(loaded.snapshot, _apply_commands(loaded.snapshot, loaded.inbox, now_s), loaded.inbox)


def _apply_commands(snapshot: Snapshot, commands: Sequence[Command], now_s: float) -> Snapshot:
    """The snapshot stands at its last tick; commands are obeyed as of now, as the next tick will."""
    intake = SnapshotBuilder(replace(snapshot, now_s=max(now_s, snapshot.now_s)))
    for command in commands:
        apply_command(intake, command)
    return intake.view()


_EVENTS_MAX = 1000
"""Of one subject, between two statements."""


def has_user_job_limit(command: Command, snapshot: Snapshot) -> bool:
    """It brings a job into a queue that takes only so many of one user."""
    match command.body:
        case SubmitJob(spec=JobSpec(queue=name)) | ChangeJob(queue=str(name)):
            queue = snapshot.queues.get(name)
            return queue is not None and queue.user_jobs_max is not None
    return False


def send_command(store: ApiStore, command: Command, *, audit: AuditEntry, has_user_job_limit: bool) -> bool:
    """As the store's `send`, and a problem where it is refused after all: 412 for its basis, 409 for a queue's limit.
    Only one with a basis, or `limited` by a queue, is looked at again."""
    is_watched = bool(command.basis) or has_user_job_limit
    seen = store.get_last_event_number() if is_watched else 0
    is_new = store.send(command, audit=audit)
    if is_new and is_watched and (told := _find_refusal(store, command, audit.subject, seen)):
        if told.cause == command.id and command.basis:
            raise ProblemError(412, "changed", told.message)
        raise_conflict(told.message)
    return is_new


def _find_refusal(store: ApiStore, command: Command, subject: str, newest_before: int) -> Event | None:
    loaded = store.load()
    intake = SnapshotBuilder(replace(loaded.snapshot, now_s=max(command.at_s, loaded.snapshot.now_s)))
    for each in loaded.inbox:
        before = len(intake.events)
        apply_command(intake, each)
        if each.id == command.id:
            return _first_refusal(intake.events[before:])
    events = [row.event for row in store.list_events(Page(after=newest_before, limit=_EVENTS_MAX), subject=subject)]
    return _first_refusal([event for event in events if event.cause == command.id])


def _first_refusal(events: list[Event]) -> Event | None:
    return next((event for event in events if event.code is EventCode.COMMAND_REFUSED), None)


V = TypeVar("V")
_JOB_ID = re.compile(r"[a-z0-9][-a-z0-9]{0,79}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`committed` is the newest snapshot; `snapshot` has the commands in it that still wait in the inbox.

    So whoever has submitted a job or registered a node finds it at once, though no tick has seen it yet. `principal` is
    who asks, and is named by what is sent.
    """

    store: ApiStore
    principal: Principal
    now_s: float
    committed: Snapshot
    snapshot: Snapshot
    state_reader: StateReader

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.principal, self.snapshot, self.store.get_ended_job)

    def redact(self, view: V) -> V:
        """`view` (plain JSON) without the ids of jobs that the principal may not see."""
        told: V = self.visibility.redact(view)
        return told

    def require_role(self, role: Role, queue: str = "") -> None:
        """Raises a 403 problem for who does not have `role` on `queue` (everywhere where it is empty)."""
        require_role(self.principal, role, queue)

    def job(self, job_id: str) -> Job:
        """A live or ended job, or a 404 problem, also where it may not be read."""
        job = self.snapshot.jobs.get(job_id)
        if job is None and _JOB_ID.fullmatch(job_id):
            job = self.store.get_ended_job(job_id)
        return job if job is not None and self.visibility.can_see_job(job) else raise_not_found("job", job_id)

    def redact_job(self, job: Job) -> Job:
        """The job with what the principal may see of its message."""
        return self.visibility.redact_job(job)

    def live_job(self, job_id: str) -> Job:
        """A job that can still change, or a problem: 404, or 409 for one that has ended."""
        job = self.job(job_id)
        if job.is_ended:
            raise_conflict(f"job {job.id} has ended: it {_PAST_TENSE.get(job.state, job.state)}")
        return job

    def pool(self, name: str) -> Pool:
        return self.snapshot.pools.get(name) or raise_not_found("pool", name, self.snapshot.pools)

    def node(self, name: str) -> Node:
        return self.snapshot.nodes.get(name) or raise_not_found("node", name, self.snapshot.nodes)

    def send(self, body: CommandBody, *, at_s: float | None = None, basis: str = "") -> RequestContext:
        """Puts a command into the inbox and gives the world as it will be once that is absorbed.

        A command that the core would refuse in the present state is a 409 problem, one that the principal may not ask
        for is a 403 problem; neither is sent. Whoever was faster with what `basis` was read of makes it a 412 problem.
        """
        command = new_command(body, self.now_s if at_s is None else at_s, actor=self.principal.name)
        after = self._send(replace(command, basis=basis))
        assert after is not None, "an id of its own"
        return after

    def send_once(self, body: CommandBody, command_id: str) -> RequestContext | None:
        """As `send`; None where a command of this id was sent before, and then nothing is sent."""
        return self._send(new_command(body, self.now_s, actor=self.principal.name, command_id=command_id))

    def _send(self, command: Command) -> RequestContext | None:
        authorize_command(self.principal, command.body, self.snapshot)
        intake = SnapshotBuilder(self.snapshot)
        apply_command(intake, command)
        for event in intake.events:
            if event.code is EventCode.COMMAND_REFUSED:
                raise_conflict(event.message)
        after = intake.view()
        audit = command_audit_entry(command, self.principal, self.snapshot, after)
        is_new = send_command(
            self.store, command, audit=audit, has_user_job_limit=has_user_job_limit(command, self.snapshot)
        )
        return replace(self, snapshot=after) if is_new else None


_PAST_TENSE = {"succeeded": "succeeded", "failed": "failed", "cancelled": "was cancelled"}


def load_request_context(
    state_reader: StateReader, store: ApiStore, now_s: float, principal: Principal
) -> RequestContext:
    shown = state_reader.read(now_s)
    at_s = max(now_s, shown.snapshot.now_s)
    return RequestContext(store, principal, at_s, shown.committed, replace(shown.snapshot, now_s=at_s), state_reader)


def new_command(body: CommandBody, at_s: float, *, actor: str, command_id: str = "") -> Command:
    """`command_id` makes the command idempotent; without one it is unique."""
    return Command(command_id or f"api-{secrets.token_hex(12)}", at_s, body, actor, is_counted=True)
