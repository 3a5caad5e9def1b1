"""Shell blocks of README and the tutorials run as they are written, by the user who runs the service."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.client import Client
from tests.docs.shell_blocks import ShellBlock, read_blocks
from tests.loopback import find_free_port

ROOT = Path(__file__).parents[2]
DOCUMENTED_URL = "http://127.0.0.1:8787"
FOLLOWED_PAGES = (
    "docs/how-to/authenticate.md",
    "docs/how-to/label-jobs.md",
    "docs/how-to/plan-a-model.md",
    "docs/how-to/run-plans-in-a-framework.md",
    "docs/how-to/see-what-lending-saves.md",
    "docs/how-to/size-an-inference-pool.md",
    "docs/tutorials/first-job.md",
    "docs/tutorials/lending.md",
    "docs/tutorials/your-own-script.md",
    "docs/tutorials/what-if.md",
)
SINGLE_PAGES = ("docs/how-to/share-with-queues.md", "docs/how-to/write-a-policy.md")
"""Pages of which each runs beside a service of its own."""
RUN_ELSEWHERE = {ROOT / page for page in ("README.md", "docs/how-to/use-checkpoints.md", *SINGLE_PAGES)}
"""Pages outside the tutorials whose blocks run in tests of their own, here or in tests/docs."""
NOT_RUN_MAX = 54
"""Blocks of all pages that carry a reason not to run. A page that adds one raises this number knowingly."""
FOLLOW_S = 5
TIMEOUT_S = 120.0


class NewUser:
    """A shell of someone who follows the pages, beside a service that was started in an empty directory.

    `programs` is the folder of an installed `ebbtide` and its `python`. By default, both run from the checkout.
    """

    def __init__(self, folder: Path, *, programs: Path | None = None) -> None:
        self.url = f"http://127.0.0.1:{find_free_port()}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
        sources = {"PYTHONPATH": str(ROOT)} if programs is None else {}
        programs = programs or _write_programs(folder / "bin")
        self.env = {
            **{name: value for name, value in inherited.items() if name != "PYTHONPATH"},
            **sources,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_STATE_HOME": str(folder / "state"),
            "EBBTIDE_URL": self.url,  # the pages use the default port, where another service may run
            "EBBTIDE_PORT": self.url.rpartition(":")[2],
        }
        self._folder = folder
        with (folder / "serve.log").open("wb") as log:
            self._service = subprocess.Popen(
                [programs / "ebbtide", "serve"], cwd=folder, env=self.env, stdout=log, stderr=log
            )

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        with Client(self.url) as client:
            while not client.is_ready():
                assert self._service.poll() is None, (self._folder / "serve.log").read_text()
                assert time.monotonic() < deadline_s, "the service does not become ready"
                time.sleep(0.2)

    def run(self, script: str) -> None:
        """Run a script with bash. Every command must succeed."""
        script = script.replace(DOCUMENTED_URL, self.url)
        outcome = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self._folder, env=self.env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert outcome.returncode == 0, f"{script}\n{outcome.stdout}\n{outcome.stderr}"

    def close(self) -> None:
        self._service.send_signal(signal.SIGTERM)
        self._service.wait(TIMEOUT_S)


def _write_programs(folder: Path) -> Path:
    folder.mkdir()
    for name, words in (("ebbtide", "-m cli"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def new_user(tmp_path: Path) -> Iterator[NewUser]:
    user = NewUser(tmp_path)
    try:
        user.wait_ready()
        yield user
    finally:
        user.close()


def interrupt_followers(script: str) -> str:
    """Press Ctrl-C after a while where the page says `# until Ctrl-C`."""
    return re.sub(
        r"^(.*?)\s+# until Ctrl-C$",
        rf"timeout --preserve-status --signal INT {FOLLOW_S} \1 || [ $? = 130 ] || [ $? = 0 ]",
        script.replace("\\\n", " "),
        flags=re.MULTILINE,
    )


def script_of(blocks: list[ShellBlock]) -> str:
    return "\n".join(interrupt_followers(block.script) for block in blocks if not block.reason)


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.skipif(shutil.which("jq") is None or shutil.which("curl") is None, reason="no curl or no jq on PATH")
def test_the_tutorials_run_as_written(new_user: NewUser) -> None:
    new_user.run("\n".join(script_of(read_blocks(ROOT / page)) for page in FOLLOWED_PAGES))


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("page", SINGLE_PAGES)
def test_guides_run_as_written(new_user: NewUser, page: str) -> None:
    new_user.run(script_of(read_blocks(ROOT / page)))


@pytest.mark.e2e
@pytest.mark.full
def test_the_scripts_of_the_python_client_run_as_written(new_user: NewUser) -> None:
    page = (ROOT / "docs" / "how-to" / "use-the-python-client.md").read_text(encoding="utf-8")
    scripts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(scripts) == 3
    prepared = """
        ebbtide pools create training --kind training
        ebbtide nodes add n0 --pool training --gpu cpu --gpus 2
        export TOKEN=$(ebbtide token create -q --name client --grant submitter)
    """
    new_user.run("\n".join([prepared, *(f"python - <<'SCRIPT'\n{script}SCRIPT" for script in scripts)]))


@pytest.mark.e2e
def test_the_readme_runs_as_written(new_user: NewUser) -> None:
    new_user.run(script_of(read_blocks(ROOT / "README.md")))


def test_blocks_that_do_not_run_are_few_and_have_reasons() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [block for page in pages for block in read_blocks(page)]
    fences = sum(page.read_text(encoding="utf-8").count("```bash") for page in pages)
    assert len(blocks) == fences
    reasons = [block.reason for block in blocks if block.reason]
    assert all(len(reason.split()) >= 4 for reason in reasons)
    assert len(reasons) <= NOT_RUN_MAX
    unfollowed = {block.page for block in blocks if not block.reason} - {ROOT / page for page in FOLLOWED_PAGES}
    assert unfollowed == RUN_ELSEWHERE
