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

from scheduler.agent.agent_state import AgentIdentity, AgentState
from scheduler.agent.containment import Containment, ContainmentLevel, ContainmentPolicy, LevelName
from scheduler.agent.control_groups import ControlGroups
from scheduler.agent.run_launcher import RunLauncher
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


def with_archive(**fields: Any) -> RunDocument:
    return replace(python_job("pass"), archive=f"sha256:{sha256(ARCHIVE).hexdigest()}", **fields)


@pytest.mark.parametrize(("archive_bytes_max", "is_accepted"), [(FILE_BYTES // UNPACKED_RATIO_MAX, True), (24, False)])
def test_unpacked_size_is_limited_as_the_service_says(
    launcher: RunLauncher, archive_bytes_max: int, *, is_accepted: bool
) -> None:
    # Its setup command fails, so that no supervisor starts.
    document = with_archive(archive_bytes_max=archive_bytes_max, setup=("sh", "-c", "exit 3"))
    failure = launcher.prepare(document, threading.Event()).poll().failure
    assert ("exited with code 3" in failure, "more than 96 bytes" in failure) == (is_accepted, not is_accepted)
