"""The inbox in the database: what waits is decoded once, and what several threads send at a time is written at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.dialects import postgresql, sqlite

from scheduler.domain.codec import decode, encode
from scheduler.domain.command import Command
from scheduler.store.engine import transaction
from scheduler.store.front import AuditEntry
from scheduler.store.protocol import UnavailableError
from scheduler.store.sql_audit import log
from scheduler.store.tables import INBOX, STATE

_WAITS = INBOX.c.consumed_at_generation.is_(None)
_STANDS = (
    select(STATE.c.generation, INBOX.c.number, INBOX.c.id)
    .select_from(STATE.outerjoin(INBOX, _WAITS))
    .order_by(INBOX.c.number)
)
COUNT = select(func.count()).select_from(INBOX).where(_WAITS)

Names = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The commands that waited at one moment, and what they are called in the database: number and id of each."""

    names: Names = ()
    commands: tuple[Command, ...] = ()


def stands(connection: Connection) -> tuple[int, Names]:
    """The generation, and what waits: enough to tell, in one statement, whether anything has changed."""
    rows = connection.execute(_STANDS).all()
    return rows[0].generation, tuple((row.number, row.id) for row in rows if row.number is not None)


def read(connection: Connection, known: Waiting, names: Names) -> Waiting:
    """The commands of these names, consumed meanwhile or not. Those that are `known` stay the same objects."""
    if names == known.names:
        return known
    commands = dict(zip(known.names, known.commands, strict=True))
    wanted = {name for name in names if name not in commands}
    if wanted:
        for row in connection.execute(select(INBOX).where(INBOX.c.number >= min(wanted)[0])):
            if (row.number, row.id) in wanted:
                commands[row.number, row.id] = decode(Command, row.body)
    return Waiting(names, tuple(commands[name] for name in names))


class _Sent:
    """A command on its way. `is_new` is None until it was written."""

    def __init__(self, command: Command, audit: AuditEntry | None) -> None:
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
        for sent in batch:
            sent.is_new = first[sent.row["id"]] is sent and sent.row["id"] in new
