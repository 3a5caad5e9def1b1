"""A secret from `ebbtide secrets set` to the rank, and nowhere else: real API, controller, agent and rank."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.machine_site import MachineSite, open_site

RANK = Path(__file__).with_name("secret_rank.py")
VALUES = (b"hf_3ZqLrXw8PfVnA1", b"ssh-k3y-uYtReWq9")
REFERENCES = [{"name": "hf-token", "env": "HF_TOKEN"}, {"name": "deploy-key", "file": "deploy-key"}]
PATHS = ("jobs", "events", "decisions", "audit", "snapshot", "queues", "queues/default/secrets", "nodes", "machines")

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[MachineSite]:
    with open_site(tmp_path) as opened:
        opened.join("m1", gpus=2)
        yield opened


def set_secret(site: MachineSite, name: str, value: bytes) -> None:
    command = [sys.executable, "-P", "-m", "cli", "secrets", "set", name, "--url", f"http://127.0.0.1:{site.port}"]
    subprocess.run(command, input=value + b"\n", check=True, capture_output=True)


def submit(site: MachineSite, name: str, *, code: int) -> str:
    script = site.shared / RANK.name
    shutil.copy(RANK, script)
    script.chmod(0o644)
    command = ["python3", str(script), str(site.shared), name, str(code)]
    return site.submit(name, command, gpus=1, secrets=REFERENCES, retries=0)


def list_hits(site: MachineSite) -> list[str]:
    """Return the files below the site and the answers of the API that contain a value or its base64 form."""
    forms = [form for value in VALUES for form in (value, base64.b64encode(value).rstrip(b"="))]
    paths = (Path(folder) / name for folder, _, names in os.walk(site.folder) for name in names)
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    answers = {path: json.dumps(read(site, path)).encode() for path in PATHS}
    for job in read(site, "jobs")["items"]:
        for part in ("", "/events", "/explanation", "/logs?rank=0", "/history", "/plan"):
            answers[f"{job['name']}{part}"] = read_raw(site, f"jobs/{job['id']}{part}")
    contents = dict(answers)
    for path in files:
        with suppress(FileNotFoundError):  # the agent deletes files while this reads
            contents[str(path.relative_to(site.folder))] = path.read_bytes()
    return sorted(name for name, content in contents.items() if any(form in content for form in forms))


def read(site: MachineSite, path: str) -> Any:
    return json.loads(read_raw(site, path))


def read_raw(site: MachineSite, path: str) -> bytes:
    return site.client._connection._http.get(f"/v1/{path}").content


def list_secret_folders() -> list[Path]:
    return list(Path("/dev/shm").glob("ebbtide-secrets-*/*"))


def test_values_are_found_nowhere_but_in_the_rank(site: MachineSite) -> None:
    before = set(list_secret_folders())
    set_secret(site, "hf-token", VALUES[0])
    set_secret(site, "deploy-key", VALUES[1])
    good, bad = submit(site, "good", code=0), submit(site, "bad", code=3)
    for name in ("good", "bad"):
        site.wait((site.shared / f"{name}.json").exists)
        seen = json.loads((site.shared / f"{name}.json").read_text())
        assert seen == {"digests": [sha256(value).hexdigest() for value in VALUES], "mode": 0o400, "is_own": True}
    assert list_hits(site) == []
    assert len(set(list_secret_folders()) - before) == 2
    for name in ("good", "bad"):
        (site.shared / f"{name}.go").touch()
    site.wait(lambda: (site.state(good), site.state(bad)) == ("succeeded", "failed"))
    site.wait(lambda: [len(list(site.client.logs(job, rank=0))) for job in (good, bad)] == [4, 4])
    site.wait(lambda: not set(list_secret_folders()) - before)
    assert list_hits(site) == []
    lines = [line["text"] for line in site.client.logs(good, rank=0)]
    assert lines[0] == "value " + "*" * len(VALUES[0])
    assert lines[1].startswith("*" * len(VALUES[0]) + " in two parts, ***")
    failure = site.client.job(bad)["failure"]
    assert failure is not None
    assert "***" in failure["reason"] + str(site.client.job(bad)["message"])


def test_a_job_waits_for_a_deleted_secret(site: MachineSite) -> None:
    set_secret(site, "hf-token", VALUES[0])
    set_secret(site, "deploy-key", VALUES[1])
    blocker = site.submit("blocker", ["sleep", "60"], gpus=2)
    site.wait(lambda: site.state(blocker) == "running")
    waiting = submit(site, "late", code=0)
    site.client.delete_secret("default", "hf-token")
    site.client.cancel(blocker)
    site.wait(lambda: "SecretMissing" in str(site.client.explanation(waiting)))
    set_secret(site, "hf-token", VALUES[0])
    (site.shared / "late.go").touch()
    site.wait_for_success(waiting)


@pytest.mark.full
def test_a_job_whose_master_key_is_lost_waits_without_a_retry(site: MachineSite) -> None:
    """The agent asks for the secrets for some seconds. A lost retry would end the job, which has none."""
    set_secret(site, "hf-token", VALUES[0])
    set_secret(site, "deploy-key", VALUES[1])
    blocker = site.submit("blocker", ["sleep", "60"], gpus=2)
    site.wait(lambda: site.state(blocker) == "running")
    waiting = submit(site, "late", code=0)
    [key_file] = site.folder.rglob("secrets.key")
    key_file.unlink()
    site.client.cancel(blocker)
    site.wait(lambda: "'missing_secrets': 2.0" in str(site.client.explanation(waiting)))
    set_secret(site, "hf-token", VALUES[0])
    set_secret(site, "deploy-key", VALUES[1])
    (site.shared / "late.go").touch()
    site.wait_for_success(waiting)
