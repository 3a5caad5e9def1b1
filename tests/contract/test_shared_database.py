"""This release and the next one take turns on one database, after the next one has migrated it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from scheduler.store.database import open_engine
from scheduler.store.schema_migration import read_revision
from tests.next_release import REVISION, build_next_release
from tests.release_turn import take_turn


def test_old_and_next_release_take_turns_on_a_database(tmp_path: Path) -> None:
    url, newer = f"sqlite:///{tmp_path / 'state.sqlite'}", build_next_release(tmp_path / "next")

    def take_next_turn(name: str) -> dict[str, str]:
        command = [sys.executable, "-P", "-m", "tests.release_turn", url, name]
        done = subprocess.run(command, env={**os.environ, **newer}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def take_this_turn(name: str) -> dict[str, str]:
        return take_turn(url, name)

    expected: dict[str, str] = {}
    for number, take in enumerate((take_this_turn, take_next_turn, take_this_turn, take_next_turn)):
        expected |= {f"job-{number}": "succeeded", f"job-{number}-big": "queued"}
        assert take(f"job-{number}") == expected
    engine = open_engine(url)
    assert read_revision(engine) == REVISION
    engine.dispose()
