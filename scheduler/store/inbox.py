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
from scheduler.domain.command import Command
from scheduler.store.engine import transaction
from scheduler.store.front import AuditEntry
from scheduler.store.protocol import UnavailableError
from scheduler.store.sql_audit import log
from scheduler.store.tables import INBOX, STATE

_WAITS = INBOX.c.consumed_at_generation.is_(None)
COUNT = select(func.count()).select_from(INBOX).where(_WAITS)
_GLANCE = (
    select(STATE.c.generation, COUNT.scalar_subquery().label("waiting"), INBOX.c.number, INBOX.c.id, INBOX.c.body)
    .select_from(STATE.outerjoin(INBOX, _WAITS & (INBOX.c.number > bindparam("after"))))
    .order_by(INBOX.c.number)
)
SENT_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Waiting:
    """The commands that waited at one moment, in ascending number, `newest` the number of the last."""

    commands: tuple[Command, ...] = ()
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Glance:
    """One statement's view: the generation, how many commands wait, and the rows of those after a number."""

    generation: int
    count: int
    rows: tuple[Row[*tuple[Any, ...]], ...]


def glance(connection: Connection, *, after: int) -> Glance:
    rows = connection.execute(_GLANCE, {"after": after}).all()
    return Glance(rows[0].generation, rows[0].waiting, tuple(row for row in rows if row.number is not None))


def joined(known: Waiting, seen: Glance, sent: Mapping[str, Command]) -> Waiting | None:
    """What waits, if that is what was `known` before, in the same generation, and the rows seen: commands leave only
    with a commit. None where one of a lower number was committed after those of higher ones. Commands that this process
    `sent` itself need no decoding."""
    if len(known.commands) + len(seen.rows) != seen.count:
        return None
    if not seen.rows:
        return known
    new = (sent.get(row.id) or decode(Command, row.body) for row in seen.rows)
    return Waiting((*known.commands, *new), seen.rows[-1].number)


class _Sent:
    """A command on its way. `is_new` is None until it was written."""

    def __init__(self, command: Command, audit: AuditEntry | None) -> None:
        self.command = command
        self.audit = audit
        self.row = {"id": command.id, "body": encode(command)}
        self.is_new: bool | None = None
        self.error: Exception | None = None


class Outbox:
    """Whoever finds nobody writing writes for all who wait: one transaction, one wait for the disk, many commands. Each
    caller returns once its own is on the disk."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        dialect = sqlite if engine.dialect.name == "sqlite" else postgresql
        unless_taken = dialect.insert(INBOX).on_conflict_do_nothing(index_elements=["id"])
        self._insert_new = unless_taken.returning(INBOX.c.id)
        self._turn = threading.Lock()
        self._unwritten: deque[_Sent] = deque()
        self.recent: dict[str, Command] = {}
        """Commands that were sent from here, by id: some of the last."""

    def send(self, command: Command, *, audit: AuditEntry | None) -> bool:
        """False where a command of this id was ever sent before; then `audit` is not written either. Raises
        UnavailableError."""
        sent = _Sent(command, audit)
        self._unwritten.append(sent)
        with self._turn:
            if sent.is_new is None and sent.error is None:
                self._write([self._unwritten.popleft() for _ in range(len(self._unwritten))])
        if isinstance(sent.error, UnavailableError):
            raise UnavailableError(str(sent.error)) from sent.error
        if sent.error is not None:
            raise sent.error
        assert sent.is_new is not None
        return sent.is_new

    def _write(self, batch: Sequence[_Sent]) -> None:
        first = {sent.row["id"]: sent for sent in reversed(batch)}
        rows = [sent.row for sent in first.values()]
        try:
            with transaction(self._engine) as connection:
                new = set(connection.execute(self._insert_new, rows).scalars())
                log(connection, [sent.audit for command_id, sent in first.items() if sent.audit and command_id in new])
        except Exception as error:  # whoever waits is told, not the one alone who happened to write
            for sent in batch:
                sent.error = error
            return
        if len(self.recent) > SENT_KEPT:
            self.recent = {}
        self.recent.update((command_id, first[command_id].command) for command_id in new)
        for sent in batch:
            sent.is_new = first[sent.row["id"]] is sent and sent.row["id"] in new
