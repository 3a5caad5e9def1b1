"""The inbox in the database: commands wait here until a tick consumes them.

Readers decode each pending command once. Commands that several threads send at a time share one transaction.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Double,
    Engine,
    Named,
    String,
    Table,
    TypedColumns,
    any_,
    bindparam,
    func,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.domain.codec import CodecError, decode_stored, encode, union_members
from scheduler.domain.commands import Command, CommandBody
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.database import METADATA, ROW_NUMBER, AnyRow, bind_array, format_array_literal, transaction
from scheduler.store.protocol import Commit, UnavailableError
from scheduler.store.sql_api_tables import insert_audit_entries
from scheduler.store.sql_state import STATE


class InboxColumns(TypedColumns):
    """Consumed commands stay, because their ids must not be used again: those that submit a job stay forever."""

    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    id: Named[str] = Column(String, unique=True, index=True)
    consumed_at_generation: Named[int | None] = Column(BigInteger, index=True)
    body: Named[Any] = Column(JSON, nullable=False)
    consumed_at_s: Named[float | None] = Column(Double)


INBOX = Table("inbox", METADATA, InboxColumns)
RECENT_COMMANDS_MAX = 4096

_IS_PENDING = INBOX.c.consumed_at_generation.is_(None)
PENDING_COUNT = select(func.count()).select_from(INBOX).where(_IS_PENDING)
_SELECT_DELTA = (
    select(
        STATE.c.generation, PENDING_COUNT.scalar_subquery().label("pending"), INBOX.c.number, INBOX.c.id, INBOX.c.body
    )
    .select_from(STATE.outerjoin(INBOX, _IS_PENDING & (INBOX.c.number > bindparam("after"))))
    .order_by(INBOX.c.number)
)
_MARK_CONSUMED = (
    update(INBOX)
    .where(_IS_PENDING)
    .values(consumed_at_generation=bindparam("at_generation"), consumed_at_s=bindparam("at_s"))
)
_MARK_CONSUMED_BY_ID = _MARK_CONSUMED.where(INBOX.c.id == bindparam("command_id"))
_MARK_CONSUMED_BY_IDS = _MARK_CONSUMED.where(INBOX.c.id == any_(bind_array("command_ids", String())))


@dataclass(frozen=True, slots=True)
class PendingCommands:
    """All pending commands of one generation, in ascending number.

    `unreadable` counts those that only a later version knows. They stay pending for a controller of that version.
    """

    commands: tuple[Command, ...] = ()
    last_number: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class InboxDelta:
    """Pending rows above a number, with the generation and the number of all pending commands at the same time."""

    generation: int
    pending_count: int
    rows: tuple[AnyRow, ...]


def fetch_inbox_delta(connection: Connection, *, after: int) -> InboxDelta:
    rows = connection.execute(_SELECT_DELTA, {"after": after}).all()
    return InboxDelta(rows[0].generation, rows[0].pending, tuple(row for row in rows if row.number is not None))


def merge_pending(pending: PendingCommands, delta: InboxDelta, recent: Mapping[str, Command]) -> PendingCommands | None:
    """Append the rows of `delta` to `pending` of the same generation, in which no command can have been consumed.

    Args:
        recent: commands by id that need no decoding, because this process sent them.

    Returns:
        None if the counts differ: a transaction with a lower number was committed after one with a higher number.
    """
    if len(pending.commands) + pending.unreadable + len(delta.rows) != delta.pending_count:
        return None
    if not delta.rows:
        return pending
    new = [command for row in delta.rows if (command := recent.get(row.id) or _decode_command(row)) is not None]
    unreadable = pending.unreadable + len(delta.rows) - len(new)
    return PendingCommands((*pending.commands, *new), delta.rows[-1].number, unreadable)


def _decode_command(row: AnyRow) -> Command | None:
    """Return the command, None for a kind that only a later version knows."""
    try:
        return decode_stored(Command, row.body)
    except CodecError:
        if isinstance(row.body, dict) and row.body.get("body", {}).get("kind") not in union_members(CommandBody):
            return None
        raise


def mark_consumed(connection: Connection, commit: Commit) -> None:
    """Mark the commands of a commit as consumed. Their ids stay in use."""
    now = {"at_generation": commit.snapshot.generation, "at_s": commit.snapshot.now_s}
    command_ids = commit.consumed_command_ids
    if command_ids and connection.dialect.name == "sqlite":
        connection.execute(_MARK_CONSUMED_BY_ID, [{"command_id": each, **now} for each in command_ids])
    elif command_ids:
        connection.execute(_MARK_CONSUMED_BY_IDS, {"command_ids": format_array_literal(command_ids), **now})


class _QueuedCommand:
    """A command that is being written. `is_new` is None until then."""

    def __init__(self, command: Command, audit: AuditEntry | None) -> None:
        self.command = command
        self.audit = audit
        self.row = {"id": command.id, "body": encode(command)}
        self.is_new: bool | None = None
        self.error: Exception | None = None


class CommandWriter:
    """Writer of commands with group commit: the thread that gets the lock writes for all threads that wait for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        dialect = sqlite if engine.dialect.name == "sqlite" else postgresql
        insert_if_new = dialect.insert(INBOX).on_conflict_do_nothing(index_elements=["id"])
        self._insert_if_new = insert_if_new.returning(INBOX.c.id)
        self._write_lock = threading.Lock()
        self._queue: deque[_QueuedCommand] = deque()
        self.recent: dict[str, Command] = {}
        """Some of the last commands that this process sent, by id."""

    def send(self, command: Command, *, audit: AuditEntry | None) -> bool:
        """Return when the command is on disk. False if its id was sent before; then `audit` is not written either.

        Raises:
            UnavailableError: the database does not respond.
        """
        queued = _QueuedCommand(command, audit)
        self._queue.append(queued)
        with self._write_lock:
            if queued.is_new is None and queued.error is None:
                self._write_batch([self._queue.popleft() for _ in range(len(self._queue))])
        if isinstance(queued.error, UnavailableError):
            raise UnavailableError(str(queued.error)) from queued.error
        if queued.error is not None:
            raise queued.error
        assert queued.is_new is not None
        return queued.is_new

    def _write_batch(self, batch: Sequence[_QueuedCommand]) -> None:
        first = {queued.row["id"]: queued for queued in reversed(batch)}
        rows = [queued.row for queued in first.values()]
        try:
            with transaction(self._engine) as connection:
                new_ids = set(connection.execute(self._insert_if_new, rows).scalars())
                audits = [each.audit for command_id, each in first.items() if each.audit and command_id in new_ids]
                insert_audit_entries(connection, audits)
        except Exception as error:  # every thread of the batch raises it, not only the one that happens to write
            for queued in batch:
                queued.error = error
            return
        if len(self.recent) > RECENT_COMMANDS_MAX:
            self.recent = {}
        self.recent.update((command_id, first[command_id].command) for command_id in new_ids)
        for queued in batch:
            queued.is_new = first[queued.row["id"]] is queued and queued.row["id"] in new_ids
