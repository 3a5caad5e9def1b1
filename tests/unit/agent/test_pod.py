"""PID 1 of a pod, as a process that starts a script instead of the agent."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scheduler.agent import pod_environment
from scheduler.agent.pod_daemon import read_cpu_limit
from scheduler.agent.pod_environment import PodIdentity, find_certificates, read_pod_environment

_RUN = "import sys; from scheduler.agent.pod import Pod; sys.exit(Pod(('/bin/sh', '-c', sys.argv[1], 'agent')).run())"
VARIABLES = {
    "EBBTIDE_JOB_ID": "a/b",
    "EBBTIDE_NODE": "n0",
    "EBBTIDE_POD": "uid",
    "EBBTIDE_URL": "http://api:8787/base/",
    "EBBTIDE_TOKEN_FILE": "/token",
    "EBBTIDE_RUN_ROOT": "/run/ebbtide",
}


def start(script: str, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-P", "-c", _RUN, script], cwd=folder, stderr=log)


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 20.0
    while not path.exists():
        assert time.monotonic() < deadline_s, path
        time.sleep(0.01)


@pytest.mark.parametrize(("code", "pod_code"), [(0, 0), (3, 1), (2, 2)])
def test_pod_ends_when_the_agent_says_so(tmp_path: Path, code: int, pod_code: int) -> None:
    assert start(f"exit {code}", tmp_path).wait(20.0) == pod_code


def test_dead_agent_is_started_again_and_its_orphans_are_reaped(tmp_path: Path) -> None:
    script = "if [ -e died ]; then sleep 0.2; exit 0; fi; touch died; (sleep 0.1; touch orphan) & kill -9 $$"
    assert start(script, tmp_path).wait(20.0) == 0
    assert (tmp_path / "orphan").exists()
    assert "The agent has ended with -9" in (tmp_path / "log").read_text()


def test_sigterm_reaches_the_agent_and_one_that_died_meanwhile_is_told_since_when(tmp_path: Path) -> None:
    script = (
        'if [ "$1" = --stopping-since ]; then echo "$2" > since; exit 0; fi; trap "kill -9 $$" TERM; touch up; '
        + ("while true; do sleep 0.05; done")
    )
    process = start(script, tmp_path)
    wait_for(tmp_path / "up")
    before_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20.0) == 0
    assert before_s <= float((tmp_path / "since").read_text()) + 0.001
    assert time.monotonic() - before_s < 10.0, "a pod that has to end waits for no backoff"


def test_identity_of_a_pod() -> None:
    identity = PodIdentity.of(read_pod_environment(VARIABLES | {"EBBTIDE_ADDRESS": "10.1.0.2"}))
    assert identity.report_path == "/v1/jobs/a%2Fb/agents/n0"
    assert identity.archive_path("sha256:00", "a/b") == "/v1/archives/sha256:00?job=a%2Fb"
    assert identity.describe_agent() == {"pod": "uid", "address": "10.1.0.2"}
    assert identity.url == "http://api:8787/base"


@pytest.mark.parametrize(("found", "expected"), [("", {"SSL_CERT_FILE": "{}/bundle.crt"}), ("bundle.crt", {})])
def test_certificates_of_the_image_are_named_where_openssl_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str, expected: dict[str, str]
) -> None:
    (tmp_path / "bundle.crt").touch()
    monkeypatch.setattr(pod_environment, "CERTIFICATE_FILES", (f"{tmp_path}/none.crt", f"{tmp_path}/bundle.crt"))
    monkeypatch.setenv("SSL_CERT_FILE", f"{tmp_path}/{found}")
    monkeypatch.setenv("SSL_CERT_DIR", f"{tmp_path}/none")
    assert find_certificates() == {name: value.format(tmp_path) for name, value in expected.items()}


@pytest.mark.parametrize("name", VARIABLES)
def test_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        read_pod_environment({**VARIABLES, name: ""})


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_malformed_grace_period_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="EBBTIDE_GRACE_S"):
        read_pod_environment(VARIABLES | {"EBBTIDE_GRACE_S": text})


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "650000 100000"}, 6),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 0),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0),
        ({}, 0),
    ],
)
def test_cpu_limit_of_the_pod(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_cpu_limit(tmp_path) == cpus
