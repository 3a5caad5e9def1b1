"""The inbox in the database: what waits is decoded once, and what several threads send at a time is written at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.domain.codec import decode, encode
from scheduler.domain.commands import Command
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.database import transaction
from scheduler.store.protocol import UnavailableError
from scheduler.store.sql_api_tables import insert_audit_entries
from scheduler.store.tables import INBOX, STATE

_IS_PENDING = INBOX.c.consumed_at_generation.is_(None)
PENDING_COUNT = select(func.count()).select_from(INBOX).where(_IS_PENDING)
_SELECT_DELTA = (
    select(
        STATE.c.generation, PENDING_COUNT.scalar_subquery().label("waiting"), INBOX.c.number, INBOX.c.id, INBOX.c.body
    )
    .select_from(STATE.outerjoin(INBOX, _IS_PENDING & (INBOX.c.number > bindparam("after"))))
    .order_by(INBOX.c.number)
)
RECENT_COMMANDS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PendingCommands:
    """The commands that waited at one moment, in ascending number, `newest` the number of the last."""

    commands: tuple[Command, ...] = ()
    last_number: int = 0


@dataclass(frozen=True, slots=True)
class InboxDelta:
    """One statement's view: the generation, how many commands wait, and the rows of those after a number."""

    generation: int
    pending_count: int
    rows: tuple[Row[*tuple[Any, ...]], ...]


def fetch_inbox_delta(connection: Connection, *, after: int) -> InboxDelta:
    rows = connection.execute(_SELECT_DELTA, {"after": after}).all()
    return InboxDelta(rows[0].generation, rows[0].waiting, tuple(row for row in rows if row.number is not None))


def merge_pending(pending: PendingCommands, delta: InboxDelta, recent: Mapping[str, Command]) -> PendingCommands | None:
    """What waits, if that is what was `known` before, in the same generation, and the rows seen: commands leave only
    with a commit. None where one of a lower number was committed after those of higher ones. Commands that this process
    `sent` itself need no decoding."""
    if len(pending.commands) + len(delta.rows) != delta.pending_count:
        return None
    if not delta.rows:
        return pending
    new = (recent.get(row.id) or decode(Command, row.body) for row in delta.rows)
    return PendingCommands((*pending.commands, *new), delta.rows[-1].number)


class _QueuedCommand:
    """A command on its way. `is_new` is None until it was written."""

    def __init__(self, command: Command, audit: AuditEntry | None) -> None:
        self.command = command
        self.audit = audit
        self.row = {"id": command.id, "body": encode(command)}
        self.is_new: bool | None = None
        self.error: Exception | None = None


class CommandWriter:
    """Whoever finds nobody writing writes for all who wait: one transaction, one wait for the disk, many commands. Each
    caller returns once its own is on the disk."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        dialect = sqlite if engine.dialect.name == "sqlite" else postgresql
        unless_taken = dialect.insert(INBOX).on_conflict_do_nothing(index_elements=["id"])
        self._insert_new = unless_taken.returning(INBOX.c.id)
        self._write_lock = threading.Lock()
        self._queue: deque[_QueuedCommand] = deque()
        self.recent: dict[str, Command] = {}
        """Commands that were sent from here, by id: some of the last."""

    def send(self, command: Command, *, audit: AuditEntry | None) -> bool:
        """False where a command of this id was ever sent before; then `audit` is not written either. Raises
        UnavailableError."""
        sent = _QueuedCommand(command, audit)
        self._queue.append(sent)
        with self._write_lock:
            if sent.is_new is None and sent.error is None:
                self._write_batch([self._queue.popleft() for _ in range(len(self._queue))])
        if isinstance(sent.error, UnavailableError):
            raise UnavailableError(str(sent.error)) from sent.error
        if sent.error is not None:
            raise sent.error
        assert sent.is_new is not None
        return sent.is_new

    def _write_batch(self, batch: Sequence[_QueuedCommand]) -> None:
        first = {sent.row["id"]: sent for sent in reversed(batch)}
        rows = [sent.row for sent in first.values()]
        try:
            with transaction(self._engine) as connection:
                new = set(connection.execute(self._insert_new, rows).scalars())
                insert_audit_entries(
                    connection, [sent.audit for command_id, sent in first.items() if sent.audit and command_id in new]
                )
        except Exception as error:  # whoever waits is told, not the one alone who happened to write
            for sent in batch:
                sent.error = error
            return
        if len(self.recent) > RECENT_COMMANDS_MAX:
            self.recent = {}
        self.recent.update((command_id, first[command_id].command) for command_id in new)
        for sent in batch:
            sent.is_new = first[sent.row["id"]] is sent and sent.row["id"] in new
