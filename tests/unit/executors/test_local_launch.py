"""The rendezvous store process of the local executor."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.executors.local_launch import RendezvousStore
from scheduler.executors.local_run import find_marked_processes

SERVER = """
import os, sys
part = sys.argv[2] + ".new"
open(part, "w").write(str(os.getpid() % 60000 + 1))
os.rename(part, sys.argv[2])
sys.stdin.read()
"""
MUTE = "import sys; print('no torch here'); sys.exit(1)"


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[RendezvousStore]:
    rendezvous = RendezvousStore((sys.executable, "-SEc", SERVER), run_root=tmp_path)
    yield rendezvous
    rendezvous.close()
    assert not find_marked_processes(tmp_path)


def wait_for_port(rendezvous: RendezvousStore, *, other_than: int | None = None) -> int:
    limit_s = time.monotonic() + 20.0
    while (port := rendezvous.port()) in (None, other_than):
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    assert port is not None
    return port


def test_store_starts_on_first_use(rendezvous: RendezvousStore, tmp_path: Path) -> None:
    assert not find_marked_processes(tmp_path)
    rendezvous.close()


def test_port_never_blocks(rendezvous: RendezvousStore, tmp_path: Path) -> None:
    (tmp_path / "rendezvous.port").write_text("1")
    assert rendezvous.port() != 1, "the port of an earlier store is ignored"
    assert wait_for_port(rendezvous) == wait_for_port(rendezvous)


def test_dead_store_is_restarted(rendezvous: RendezvousStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = wait_for_port(rendezvous)
    (store,) = find_marked_processes(tmp_path)
    os.kill(store.pid, signal.SIGKILL)
    assert wait_for_port(rendezvous, other_than=first) != first
    assert "rendezvous store" in caplog.text


def test_failed_start_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rendezvous = RendezvousStore((sys.executable, "-SEc", MUTE), run_root=tmp_path)
    limit_s = time.monotonic() + 20.0
    while "no torch here" not in caplog.text:
        assert time.monotonic() < limit_s
        assert rendezvous.port() is None
        time.sleep(0.01)
    rendezvous.close()
