"""What is written together fails together: each of those who wait is told."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy.exc import StatementError

from scheduler.domain.commands import Command, PauseLending
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.database import open_engine
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_inbox import CommandWriter


def test_what_the_database_cannot_take_is_told_to_all_who_sent_at_that_time(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    engine = open_engine(url)
    outbox, told = CommandWriter(engine), list[object]()
    unfit = AuditEntry(0.0, "ada", "", "PauseLending", "fleet", {"not": object()}, None, "")

    def send(number: int) -> None:
        try:
            told.append(outbox.send(Command(f"c{number}", 0.0, PauseLending()), audit=unfit if number == 2 else None))
        except StatementError as failed:
            told.append(type(failed))

    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    with outbox._write_lock:
        for each in senders:
            each.start()
        while len(outbox._queue) < len(senders):
            pass
    for each in senders:
        each.join()
    assert told == [StatementError] * 4
    assert outbox.send(Command("c1", 0.0, PauseLending()), audit=None), "nothing of it was written"
    engine.dispose()
