"""The systemd unit of the service: its exposure as systemd rates it, and the service within the same restrictions."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbtide.client import Client
from tests.loopback import find_free_port

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "ebbtide.service"
EXPOSURE_MAX = 3.0
TIMEOUT_S = 180.0
USER = "65534"
PROC_FILES = tuple(
    f"/proc/{name}" for name in ("cpuinfo", "diskstats", "loadavg", "meminfo", "stat", "uptime", "vmstat")
)
DENY_EXECUTABLE_MEMORY = """
import ctypes, os, sys
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0) != 0:
    print("this kernel does not deny executable memory", flush=True)
os.umask(0o077)
os.execv(sys.executable, [sys.executable, "-P", "-m", "cli", *sys.argv[1:]])
"""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_exposure_of_the_service_is_low() -> None:
    threshold = f"--threshold={round(10 * EXPOSURE_MAX)}"
    run = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", threshold, str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout[-500:], run.stderr)


def test_unit_runs_as_a_user_with_private_files() -> None:
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    assert {"User=ebbtide", "UMask=0077", "NoNewPrivileges=yes", "CapabilityBoundingSet="} <= set(lines)


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_service_works_within_the_restrictions_of_the_unit(tmp_path: Path) -> None:
    """Bubblewrap gives it a read-only system, private devices and temporary files, and no capabilities.

    Authentication is on, so the service creates a token. With `ProcSubset=pid`, /proc has processes only;
    bubblewrap cannot mount it so, but covers the other files with a device that cannot be read.
    """
    state, port = tmp_path / "state", find_free_port()
    state.mkdir(mode=0o700)
    needed = (ROOT, Path(sys.executable).resolve(), tmp_path)
    closed = [path for path in ("/home", "/root") if not any(each.is_relative_to(path) for each in needed)]
    hidden = [word for path in closed for word in ("--tmpfs", path)]
    sandbox = [
        *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", *hidden),
        *("--unshare-user", "--unshare-ipc", "--unshare-uts", "--uid", USER, "--gid", USER, "--cap-drop", "ALL"),
        *(word for path in PROC_FILES if Path(path).exists() for word in ("--ro-bind", "/dev/null", path)),
        *("--bind", str(state), str(state), "--chdir", str(state), "--die-with-parent", "--new-session"),
    ]
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "EBBTIDE_DATABASE_URL": f"sqlite:///{state / 'ebbtide.sqlite'}",
        "EBBTIDE_RUN_DIR": str(state / "run"),
        "EBBTIDE_PORT": str(port),
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*sandbox, sys.executable, "-c", DENY_EXECUTABLE_MEMORY, "serve", "--no-agent"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    deadline_s = time.monotonic() + TIMEOUT_S
    client = Client(f"http://127.0.0.1:{port}")
    try:
        while not client.is_ready():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.1)
        client.close()
        token_file = state / "run" / "local.token"
        client = Client(f"http://127.0.0.1:{port}", token=token_file.read_text(encoding="ascii").strip())
        client.create_pool({"name": "training", "kind": "training"})
        document = {"name": "waiting", "gpus": {"min": 1, "max": 1}, "command": ["true"], "model": "gpt2"}
        job_id = client.submit(document | {"globalBatch": 8})["id"]
        while client.job(job_id)["state"] not in ("queued", "failed", "planning"):
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.1)
        for file in (state / "ebbtide.sqlite", state / "run" / "token.secret", token_file):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    finally:
        client.close()
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)
