"""The rendezvous store as a process."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.worker.rendezvous import main
from tests.loopback import find_free_port

pytestmark = pytest.mark.e2e

COMMAND = [sys.executable, "-m", "scheduler.worker.rendezvous", "--port-file"]


def _read_port(path: Path) -> int:
    for _ in range(1500):
        if path.exists():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError("no port within 30 s")


def _accepts(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0


def _closes_soon(port: int) -> bool:
    for _ in range(500):
        if not _accepts("127.0.0.1", port):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def store(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*COMMAND, str(tmp_path / "port")], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_store_listens_on_its_address_only_until_standard_input_closes(
    tmp_path: Path, store: subprocess.Popen[bytes]
) -> None:
    port = _read_port(tmp_path / "port")
    assert [path.name for path in tmp_path.iterdir()] == ["port"]
    assert _accepts("127.0.0.1", port)
    assert not _accepts("127.0.0.2", port)
    assert store.stdin is not None
    store.stdin.close()
    assert store.wait(timeout=60) == 0


def test_store_ends_on_sigterm(tmp_path: Path, store: subprocess.Popen[bytes]) -> None:
    _read_port(tmp_path / "port")
    store.send_signal(signal.SIGTERM)
    assert store.wait(timeout=60) == 0


def test_store_ends_with_its_parent_even_if_its_input_stays_open(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *COMMAND, str(tmp_path / "port")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        child_pid = int(parent.stdout.readline())
        try:
            port = _read_port(tmp_path / "port")
        finally:
            parent.kill()
            parent.wait()
        ended = _closes_soon(port)
        if not ended:
            os.kill(child_pid, signal.SIGKILL)
        assert ended


def test_service_listens_on_its_port_until_sigterm_without_an_input() -> None:
    port = find_free_port()
    command = [*COMMAND[:-1], "--port", str(port), "--host", "127.0.0.1"]
    for _ in range(2):  # the second service must be able to bind the port of the first
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(1500):
                if _accepts("127.0.0.1", port):
                    break
                time.sleep(0.02)
            assert _accepts("127.0.0.1", port)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("options", [[], ["--port", "0"], ["--port", "http"], ["--port", "80", "--port-file", "x"]])
def test_exactly_one_of_port_and_port_file_is_required(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rendezvous", *options])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    assert "--port" in capsys.readouterr().err
