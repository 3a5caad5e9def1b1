"""Group commit of commands: every thread of a failed batch gets the error."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy.exc import StatementError

from scheduler.domain.commands import Command, PauseLending
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.database import open_engine
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_inbox import CommandWriter


def test_error_of_one_command_reaches_all_threads_of_its_batch(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    engine = open_engine(url)
    writer, results = CommandWriter(engine), list[object]()
    unencodable = AuditEntry(0.0, "ada", "", "PauseLending", "fleet", {"not": object()}, None, "")

    def send(number: int) -> None:
        try:
            audit = unencodable if number == 2 else None
            results.append(writer.send(Command(f"c{number}", 0.0, PauseLending()), audit=audit))
        except StatementError as error:
            results.append(type(error))

    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    with writer._write_lock:
        for each in senders:
            each.start()
        while len(writer._queue) < len(senders):
            pass
    for each in senders:
        each.join()
    assert results == [StatementError] * 4
    assert writer.send(Command("c1", 0.0, PauseLending()), audit=None), "the batch wrote nothing"
    engine.dispose()
