"""The README's first hour works as written: shell, curl and Python, on a service with authentication."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.client import Client
from tests.loopback import find_free_port

ROOT = Path(__file__).parents[2]
WRITTEN_URL = "http://127.0.0.1:8787"
UNTIL_INTERRUPTED_S = 20
TIMEOUT_S = 120.0


def blocks() -> list[str]:
    """Return the indented blocks of the first hour in order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A first hour\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?:^(?: {4}.*)?\n)+", text, re.MULTILINE)
    return [textwrap.dedent(block).strip() + "\n" for block in found if block.strip()]


def block_with(words: str) -> str:
    [block] = [block for block in blocks() if words in block]
    return block


def interrupted(script: str) -> str:
    """Return the script with Ctrl-C pressed after a while where the text says so."""
    joined = script.replace("\\\n", " ")
    return re.sub(
        r"^(.*?)\s+# until Ctrl-C$",
        rf"timeout --preserve-status --signal INT {UNTIL_INTERRUPTED_S} \1 || [ $? = 130 ] || [ $? = 0 ]",
        joined,
        flags=re.MULTILINE,
    )


class FirstHour:
    """A new user's shell, with a service that was started in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{find_free_port()}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
        installed = folder / "bin"
        installed.mkdir()
        for name, words in (("ebbtide", "-m cli"), ("python", "")):
            (installed / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (installed / name).chmod(0o755)
        self.env = {
            **kept,
            "PATH": f"{installed}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "EBBTIDE_AUTH": "on",
            "EBBTIDE_PORT": self.url.rpartition(":")[2],
        }
        self._folder = folder
        with (folder / "serve.log").open("wb") as log:
            self._service = subprocess.Popen(
                [sys.executable, "-m", "cli", "serve"], cwd=folder, env=self.env, stdout=log, stderr=log
            )

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        with Client(self.url) as client:
            while not client.is_ready():
                assert self._service.poll() is None, (self._folder / "serve.log").read_text()
                assert time.monotonic() < deadline_s, "the service does not become ready"
                time.sleep(0.2)

    def type(self, *scripts: str) -> str:
        """Run the scripts in bash, which must succeed, and return their output."""
        script = "set -eo pipefail\n" + "\n".join(interrupted(each.replace(WRITTEN_URL, self.url)) for each in scripts)
        done = subprocess.run(
            ["bash", "-c", script], cwd=self._folder, env=self.env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def close(self) -> None:
        self._service.send_signal(signal.SIGINT)
        self._service.wait(TIMEOUT_S)


@pytest.fixture
def first_hour(tmp_path: Path) -> Iterator[FirstHour]:
    hour = FirstHour(tmp_path)
    try:
        hour.wait_ready()
        yield hour
    finally:
        hour.close()


@pytest.mark.e2e
@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "jq"))), reason="bash, curl or jq is missing")
def test_first_hour_works_as_written(first_hour: FirstHour) -> None:
    login = block_with("ebbtide login")
    served = block_with("ebbtide logs").partition("ebbtide pools")  # what comes before it has been done
    shell = first_hour.type(login, "".join(served[1:]))
    assert "loss" in shell, shell
    assert "GPU" in shell
    curl = first_hour.type(login.splitlines()[1], block_with("JOB=$(curl"))
    assert "data: " in curl
    program = block_with("from api.client import Client").replace(WRITTEN_URL, first_hour.url)
    python = first_hour.type(login.splitlines()[1], f"python - <<'END'\n{program}END")
    assert re.search("GPUs? on n0", python)
    states = first_hour.type("ebbtide ps -o json | jq -r '.[].intent'").split()
    assert states == ["cancel"] * 3
