"""Preparing runs on a machine: the archive of a job, within the limits that the control plane states."""

from __future__ import annotations

import gzip
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from scheduler.agent import checkpoint_folder, supervised_run
from scheduler.agent.agent_state import AgentIdentity, AgentState
from scheduler.agent.containment import Containment, ContainmentLevel, ContainmentPolicy, LevelName
from scheduler.agent.control_groups import ControlGroups
from scheduler.agent.run_launcher import RunLauncher
from scheduler.agent.supervised_run import SupervisedRun
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.machine import MachineInventory
from scheduler.domain.program import UNPACKED_RATIO_MAX
from scheduler.domain.run_document import RunDocument
from tests.agent.runs import python_job
from tests.http_server import LoopbackServer, QuietHandler

FILE_BYTES = 100


def pack_file() -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        entry = tarfile.TarInfo("train.py")
        entry.size = FILE_BYTES
        tar.addfile(entry, io.BytesIO(bytes(FILE_BYTES)))
    return gzip.compress(raw.getvalue(), mtime=0)


ARCHIVE = pack_file()


class ArchiveHandler(QuietHandler, BaseHTTPRequestHandler):
    """Serves the archive under every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ARCHIVE)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[RunLauncher]:
    containment = Containment(ContainmentPolicy(), (), ControlGroups({}), ContainmentLevel(LevelName.NONE), "")
    with LoopbackServer(ArchiveHandler) as server:
        identity = AgentIdentity("m1", ("m1",), server.url, "ebm_x")
        yield RunLauncher(AgentState(tmp_path / "state"), identity, containment, MachineInventory(cpus=1), preload=())


def prepare(launcher: RunLauncher, document: RunDocument) -> SupervisedRun:
    return launcher.prepare(document, threading.Event())


def with_archive(**fields: Any) -> RunDocument:
    return replace(python_job("pass"), archive=f"sha256:{sha256(ARCHIVE).hexdigest()}", **fields)


@pytest.mark.parametrize(("archive_bytes_max", "is_accepted"), [(FILE_BYTES // UNPACKED_RATIO_MAX, True), (24, False)])
def test_unpacked_size_is_limited_as_the_service_says(
    launcher: RunLauncher, archive_bytes_max: int, *, is_accepted: bool
) -> None:
    # Its setup command fails, so that no supervisor starts.
    document = with_archive(archive_bytes_max=archive_bytes_max, setup=("sh", "-c", "exit 3"))
    failure = prepare(launcher, document).poll().failure
    assert ("exited with code 3" in failure, "more than 96 bytes" in failure) == (is_accepted, not is_accepted)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"archive_bytes_max": 1}, PermanentFault.ARCHIVE_REFUSED),
        ({"setup": ("sh", "-c", "no-such-program")}, PermanentFault.COMMAND_NOT_FOUND),
        ({"setup": ("sh", "-c", "exit 3")}, None),
        ({"archive": f"sha256:{'0' * 64}"}, None),  # it may have been truncated on its way
    ],
)
def test_failed_preparation_says_whether_another_try_can_help(
    launcher: RunLauncher, fields: dict[str, Any], fault: PermanentFault | None
) -> None:
    assert prepare(launcher, replace(with_archive(), **fields)).poll().permanent_fault is fault


def test_checkpoint_directory_that_does_not_answer_fails_its_job_alone(
    launcher: RunLauncher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint_folder, "_RESOLVE", "import time; time.sleep(60)")
    monkeypatch.setattr(checkpoint_folder, "_TIMEOUT_S", 0.2)
    state = prepare(launcher, replace(python_job("pass"), checkpoint_dir=str(tmp_path / "stale"))).poll()
    assert state.has_ended
    assert f"stat {tmp_path / 'stale'}" in state.failure


def test_unexpected_error_fails_its_job_alone(launcher: RunLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a fault of the agent")

    monkeypatch.setattr(supervised_run, "open_checkpoint_folder", fail)
    assert "a fault of the agent" in prepare(launcher, python_job("pass")).poll().failure


def test_generation_that_was_discarded_before_it_began_can_be_prepared_again(launcher: RunLauncher) -> None:
    """The order to discard it may have followed from an older state of the job."""
    first = prepare(launcher, python_job("pass"))
    first.kill()
    first.settle()
    second = prepare(launcher, python_job("pass"))
    assert second.poll().failure == ""
    second.kill()


def test_generation_that_could_not_be_prepared_is_not_prepared_again(launcher: RunLauncher) -> None:
    document = with_archive(setup=("sh", "-c", "exit 3"))
    prepare(launcher, document).settle()
    assert prepare(launcher, replace(document, setup=())).poll().has_ended
