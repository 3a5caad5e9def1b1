"""Present: the state as of now, kept up in one process for all of its requests.

A request sees whatever was committed or sent before it came, through whichever process: each asks the database. But it
shares the asking with others that came meanwhile, and only what is new is read, decoded and obeyed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.core.commands import obey
from scheduler.core.intake import Intake
from scheduler.domain.command import Command
from scheduler.domain.snapshot import Snapshot
from scheduler.store.protocol import Loaded, Store


@dataclass(frozen=True, slots=True)
class Shown:
    """`committed` is the newest snapshot; `snapshot` has the commands in it that still wait in the inbox."""

    committed: Snapshot
    snapshot: Snapshot
    obeyed: tuple[Command, ...] = ()


class Present:
    """Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = threading.Lock()
        self._begun = 0
        self._shown_by = 0  # the look, by number, that `_shown` comes from
        self._shown = Shown(Snapshot(), Snapshot())

    def look(self, now_s: float) -> Shown:
        """The state with everything in it that was there when this was called. Raises UnavailableError."""
        came = self._begun
        with self._turn:
            if self._shown_by <= came:  # no look has begun since, and ended
                self._begun += 1
                self._shown = _moved_on(self._shown, self._store.load(), now_s)
                self._shown_by = self._begun
            return self._shown


def _moved_on(shown: Shown, loaded: Loaded, now_s: float) -> Shown:
    known = len(shown.obeyed)
    if loaded.snapshot is shown.committed and loaded.inbox[:known] == shown.obeyed:
        if len(loaded.inbox) == known:
            return shown
        return Shown(loaded.snapshot, _obeyed(shown.snapshot, loaded.inbox[known:], now_s), loaded.inbox)
    return Shown(loaded.snapshot, _obeyed(loaded.snapshot, loaded.inbox, now_s), loaded.inbox)


def _obeyed(snapshot: Snapshot, commands: Sequence[Command], now_s: float) -> Snapshot:
    """The snapshot stands at its last tick; commands are obeyed as of now, as the next tick will."""
    intake = Intake(replace(snapshot, now_s=max(now_s, snapshot.now_s)))
    for command in commands:
        obey(intake, command)
    return intake.view()
