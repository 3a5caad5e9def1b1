"""The state as one request sees it, and the only way in which a request changes it.

`StateReader` shares reads of the database between concurrent requests. `RequestContext` gives an endpoint the snapshot,
lookups that respect visibility, and `send`, which puts a command into the inbox.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from api.http.errors import ProblemError, raise_conflict, raise_not_found
from api.identity.audit import command_audit_entry, command_subject
from api.identity.authorization import Visibility, authorize_command, require_role
from api.identity.principals import Principal, Role
from scheduler.domain.commands import ChangeJob, Command, CommandBody, SubmitJob
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.job import Job
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.fleet_hardware import FleetHardwareLoader
from scheduler.scheduling.commands import apply_command
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.store.api_protocol import ApiStore, AuditEntry
from scheduler.store.protocol import LoadedState, Page


@dataclass(frozen=True, slots=True)
class CurrentState:
    """`committed` is the newest snapshot. `snapshot` also contains the effect of the commands still in the inbox."""

    committed: Snapshot
    snapshot: Snapshot
    applied: tuple[Command, ...] = ()


class StateReader:
    """Reader of the current state, which reads once for all requests that wait at the same time. Thread-safe.

    Each result contains everything that any process committed or sent before the call. Only new commands are decoded
    and applied.
    """

    def __init__(self, store: ApiStore) -> None:
        self._store = store
        self._fleet_hardware = FleetHardwareLoader(store)
        self._read_lock = threading.Lock()
        self._reads_started = 0
        self._state_read_number = 0  # which read `_state` comes from
        self._state = CurrentState(Snapshot(), Snapshot())

    def read(self, now_s: float) -> CurrentState:
        """Return the state, including everything that was stored before this call. Raises UnavailableError."""
        reads_before = self._reads_started
        with self._read_lock:
            if self._state_read_number <= reads_before:  # no other read has started and finished since this call
                self._reads_started += 1
                self._state = _advance(self._state, self._store.load(), now_s)
                self._state_read_number = self._reads_started
                self._fleet_hardware.load_for(self._state.snapshot)
            return self._state


def _advance(state: CurrentState, loaded: LoadedState, now_s: float) -> CurrentState:
    known = len(state.applied)
    if loaded.snapshot is state.committed and loaded.inbox[:known] == state.applied:
        if len(loaded.inbox) == known:
            return state
        return CurrentState(loaded.snapshot, _apply_commands(state.snapshot, loaded.inbox[known:], now_s), loaded.inbox)
    return CurrentState(loaded.snapshot, _apply_commands(loaded.snapshot, loaded.inbox, now_s), loaded.inbox)


def _apply_commands(snapshot: Snapshot, commands: Sequence[Command], now_s: float) -> Snapshot:
    """Return the snapshot after the commands, applied as of now, as the next tick will apply them."""
    builder = MutableSnapshot(replace(snapshot, now_s=max(now_s, snapshot.now_s)))
    for command in commands:
        apply_command(builder, command)
    return builder.view()


_EVENTS_MAX = 1000
"""Events of one subject that are read to find a refusal."""


def has_user_job_limit(command: Command, snapshot: Snapshot) -> bool:
    """Return whether the command adds a job to a queue that limits the jobs per user."""
    match command.body:
        case SubmitJob(spec=JobSpec(queue=name)) | ChangeJob(queue=str(name)):
            queue = snapshot.queues.get(name)
            return queue is not None and queue.user_jobs_max is not None
    return False


def send_command(store: ApiStore, command: Command, *, audit: AuditEntry | None, has_user_job_limit: bool) -> bool:
    """Send the command to the store. Return False if a command with its id was sent before.

    A command with a basis, or for a queue with a job limit, was checked against the state before it was sent. A
    concurrent request may have sent another command in between. So the inbox is checked again in its order, and the
    events of the subject if a tick has already consumed the inbox.

    Raises:
        ProblemError: 412 if the basis changed, 409 if the command was refused for another reason.
    """
    is_watched = bool(command.basis) or has_user_job_limit
    newest_before = store.get_last_event_number() if is_watched else 0
    is_new = store.send(command, audit=audit)
    if is_new and is_watched and (refusal := _find_refusal(store, command, newest_before)):
        if refusal.cause == command.id and command.basis:
            raise ProblemError(412, "changed", refusal.message)
        raise_conflict(refusal.message)
    return is_new


def _find_refusal(store: ApiStore, command: Command, newest_before: int) -> Event | None:
    subject = command_subject(command.body)
    loaded = store.load()
    builder = MutableSnapshot(replace(loaded.snapshot, now_s=max(command.at_s, loaded.snapshot.now_s)))
    for pending in loaded.inbox:
        before = len(builder.events)
        apply_command(builder, pending)
        if pending.id == command.id:
            return _first_refusal(builder.events[before:])
    events = [row.event for row in store.list_events(Page(after=newest_before, limit=_EVENTS_MAX), subject=subject)]
    return _first_refusal([event for event in events if event.cause == command.id])


def _first_refusal(events: list[Event]) -> Event | None:
    return next((event for event in events if event.code is EventCode.COMMAND_REFUSED), None)


V = TypeVar("V")
_JOB_ID = re.compile(r"[a-z0-9][-a-z0-9]{0,79}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The state of one request.

    `snapshot` includes commands that no tick has applied yet, so a client finds objects that it has just created.
    `principal` is the caller, whose name is recorded in every command.
    """

    store: ApiStore
    principal: Principal
    now_s: float
    committed: Snapshot
    snapshot: Snapshot
    state_reader: StateReader

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.principal, self.snapshot, self.store.get_ended_job, self.store.find_ended_job_queues)

    def redact(self, view: V) -> V:
        """Return the JSON value with the ids of hidden jobs replaced."""
        redacted: V = self.visibility.redact(view)
        return redacted

    def require_role(self, role: Role, queue: str = "") -> None:
        """Raise a 403 unless the principal has `role` on `queue`, or on all queues if `queue` is empty."""
        require_role(self.principal, role, queue)

    def job(self, job_id: str) -> Job:
        """Return a live or ended job. Raises a 404 if it does not exist or is hidden from the principal."""
        job = self.snapshot.jobs.get(job_id)
        if job is None and _JOB_ID.fullmatch(job_id):
            job = self.store.get_ended_job(job_id)
        return job if job is not None and self.visibility.can_see_job(job) else raise_not_found("job", job_id)

    def redact_job(self, job: Job) -> Job:
        """Return the job with hidden job ids removed from its message."""
        return self.visibility.redact_job(job)

    def live_job(self, job_id: str) -> Job:
        """Return a job that has not ended. Raises a 404, or a 409 if it has ended."""
        job = self.job(job_id)
        if job.is_ended:
            raise_conflict(f"job {job.id} {_PAST_TENSE.get(job.state, 'has ended')} and cannot be changed")
        return job

    def pool(self, name: str) -> Pool:
        return self.snapshot.pools.get(name) or raise_not_found("pool", name, self.snapshot.pools)

    def node(self, name: str) -> Node:
        return self.snapshot.nodes.get(name) or raise_not_found("node", name, self.snapshot.nodes)

    def send(
        self, body: CommandBody, *, at_s: float | None = None, basis: str = "", is_audited: bool = True
    ) -> RequestContext:
        """Send a command and return the state with the command applied.

        `is_audited` is False for a command that is part of a change with an entry of its own.

        Raises:
            ProblemError: 403 if the principal may not send it, 409 if the current state does not allow it, 412 if the
                resource no longer matches `basis`. The first two are found before anything is sent.
        """
        command = new_command(body, self.now_s if at_s is None else at_s, self.principal)
        after = self._send(replace(command, basis=basis), is_audited=is_audited)
        assert after is not None, "random command ids are unique"
        return after

    def send_once(self, body: CommandBody, command_id: str) -> RequestContext | None:
        """Send a command like `send`, or return None if a command with this id was sent before."""
        return self._send(new_command(body, self.now_s, self.principal, command_id=command_id))

    def _send(self, command: Command, *, is_audited: bool = True) -> RequestContext | None:
        authorize_command(self.principal, command.body, self.snapshot)
        builder = MutableSnapshot(self.snapshot)
        apply_command(builder, command)
        for event in builder.events:
            if event.code is EventCode.COMMAND_REFUSED:
                raise_conflict(event.message)
        after = builder.view()
        audit = command_audit_entry(command, self.principal, self.snapshot, after)
        is_new = send_command(
            self.store,
            command,
            audit=audit if is_audited else None,
            has_user_job_limit=has_user_job_limit(command, self.snapshot),
        )
        return replace(self, snapshot=after) if is_new else None


_PAST_TENSE = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}


def load_request_context(
    state_reader: StateReader, store: ApiStore, now_s: float, principal: Principal
) -> RequestContext:
    state = state_reader.read(now_s)
    at_s = max(now_s, state.snapshot.now_s)
    return RequestContext(store, principal, at_s, state.committed, replace(state.snapshot, now_s=at_s), state_reader)


def new_command(body: CommandBody, at_s: float, principal: Principal, *, command_id: str = "") -> Command:
    """Return a command of the principal with the given id, or with a random one."""
    command_id = command_id or f"api-{secrets.token_hex(12)}"
    return Command(command_id, at_s, body, principal.name, is_counted=True, actor_id=principal.subject)
