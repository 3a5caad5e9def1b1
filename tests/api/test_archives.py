"""Archives of working directories over HTTP: uploads, the submissions that name them, and who may download them."""

from __future__ import annotations

import asyncio
import errno
import gzip
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.commands import SubmitJob
from scheduler.domain.program import Program
from scheduler.domain.worker_token import issue_agent_token
from scheduler.settings import Settings
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import JOB, SECRET, ApiService, Problem
from tests.api.test_machines import create_token, join

ARCHIVE = gzip.compress(b"archive", mtime=0)
LIMIT = 3_000_000


def digest_of(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"


def path_of(content: bytes) -> str:
    return f"/v1/archives/{digest_of(content)}"


PATH, DIGEST = path_of(ARCHIVE), digest_of(ARCHIVE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archives"


@pytest.fixture
def service(folder: Path) -> ApiService:
    return ApiService(Settings(auth="off", allowed_hosts="service", archive_dir=folder, archive_bytes_max=LIMIT))


@pytest.fixture
def guarded(folder: Path) -> AuthenticatedService:
    return AuthenticatedService(archive_dir=folder).with_fleet()


def test_an_upload_is_stored_once_under_its_digest(service: ApiService, folder: Path) -> None:
    assert service.http.head(PATH).status_code == 404
    created, again = (service.http.put(PATH, content=ARCHIVE) for _ in range(2))
    assert (created.status_code, again.status_code) == (201, 200)
    assert created.headers["location"] == PATH
    assert created.json() == again.json() == {"digest": DIGEST, "bytes": len(ARCHIVE)}
    assert service.http.head(PATH).status_code == 200
    [file] = folder.iterdir()
    assert (file.read_bytes(), file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (ARCHIVE, 0o600, 0o700)
    assert service.http.get(PATH).content == ARCHIVE


def test_a_large_upload_in_pieces_is_stored(service: ApiService) -> None:
    content = os.urandom(LIMIT - 100)
    pieces = (content[at : at + 65_536] for at in range(0, len(content), 65_536))
    assert service.http.put(path_of(content), content=pieces).json()["bytes"] == len(content)
    assert service.http.get(path_of(content)).content == content


@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_upload_above_the_limit_leaves_nothing(
    service: ApiService, folder: Path, problem: Problem, is_chunked: bool
) -> None:
    content = bytes(LIMIT + 1)
    answer = service.http.put(path_of(content), content=iter([content]) if is_chunked else content)
    assert str(LIMIT) in problem(answer, 413)["detail"]
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("content", [b"", ARCHIVE[:-1], ARCHIVE + b"x"])
def test_a_body_with_another_digest_is_refused(
    service: ApiService, folder: Path, problem: Problem, content: bytes
) -> None:
    [error] = problem(service.http.put(PATH, content=content), 422)["errors"]
    assert error["field"] == "digest"
    assert digest_of(content) in error["allowed"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("digest", ["sha256:abc", "md5:" + "0" * 32, "0" * 64, DIGEST.upper(), "%2e%2e%2fpasswd"])
def test_a_malformed_digest_is_refused(service: ApiService, problem: Problem, digest: str) -> None:
    for method in ("PUT", "GET"):
        answer = service.http.request(method, f"/v1/archives/{digest}")
        assert problem(answer, answer.status_code)["status"] in (404, 422)


def test_an_interrupted_upload_leaves_nothing(service: ApiService, folder: Path) -> None:
    sent: list[dict[str, Any]] = []
    received: list[dict[str, Any]] = [
        {"type": "http.request", "body": ARCHIVE[:5], "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"service"), (b"content-length", str(len(ARCHIVE)).encode())]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "PUT",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "root_path": "",
    }
    asyncio.run(service.app(scope, receive, send))
    assert sent[0]["status"] == 400
    assert list(folder.iterdir()) == []
    assert service.http.put(PATH, content=ARCHIVE).status_code == 201


def test_a_full_disk_is_reported_and_leaves_nothing(
    service: ApiService, folder: Path, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    answer = service.http.put(PATH, content=ARCHIVE)
    assert "No space left on device" in problem(answer, 503)["detail"]
    assert list(folder.iterdir()) == []


def test_a_job_names_a_stored_archive(service: ApiService, problem: Problem) -> None:
    program: dict[str, Any] = {"workdir": {"archive": DIGEST}, "setup": ["make"], "venv": ".venv", "launch": "node"}
    [error] = problem(service.post("/v1/jobs", {**JOB, **program}), 422)["errors"]
    assert (error["field"], error["value"]) == ("workdir.archive", DIGEST)
    assert service.post("/v1/jobs:dry-run", {**JOB, **program}).status_code == 200
    service.http.put(PATH, content=ARCHIVE)
    spec = service.get(f"/v1/jobs/{service.submit(**program)}")["spec"]
    assert {name: spec[name] for name in program} == program
    [command] = service.store.load().inbox
    assert isinstance(command.body, SubmitJob)
    assert command.body.spec.program == Program(DIGEST, ("make",), ".venv", command.body.spec.program.launch)


def test_a_submission_keeps_its_archive(service: ApiService, folder: Path) -> None:
    service.http.put(PATH, content=ARCHIVE)
    [file] = folder.iterdir()
    for use in (lambda: service.http.head(PATH), lambda: service.submit(workdir={"archive": DIGEST})):
        os.utime(file, (1, 1))
        use()
        assert file.stat().st_mtime == service.clock.now_s()


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"command": []}, "command"),
        ({"command": [], "template": None}, "command"),
        ({"workdir": {"archive": "sha256:1"}}, "workdir.archive"),
        ({"workdir": {}}, "workdir.archive"),
        ({"setup": ["make"]}, "setup"),
        ({"venv": ".venv"}, "venv"),
        ({"venv": "/home/../anna"}, "venv"),
        ({"launch": "pod"}, "launch"),
    ],
)
def test_invalid_programs_are_refused_by_field(service: ApiService, document: dict[str, Any], field: str) -> None:
    [error] = service.refused("POST", "/v1/jobs", {**JOB, **document})["errors"]
    assert error["field"] == field


def test_only_an_image_or_a_template_replaces_the_command(service: ApiService) -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "trainer"}]}}
    for document in ({"image": "trainer"}, {"template": template}):
        service.submit(command=[], **document)
    assert service.post("/v1/jobs:dry-run", {**JOB, "command": []}).status_code == 200


def test_uploads_and_checks_need_a_submitter(guarded: AuthenticatedService, problem: Problem) -> None:
    viewer, submitter = guarded.token("vera", "viewer"), guarded.token("anna", "submitter:research")
    for token, uploaded, checked in (("", 401, 401), (viewer, 403, 403), (submitter, 201, 200)):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        assert guarded.http.put(PATH, content=ARCHIVE, headers=headers).status_code == uploaded
        assert guarded.http.head(PATH, headers=headers).status_code == checked


def test_downloads_need_an_admin_or_the_agent_of_a_job_with_the_archive(
    guarded: AuthenticatedService, problem: Problem
) -> None:
    anna = guarded.token("anna", "submitter:research", "queue-admin:research")
    headers = {"Authorization": f"Bearer {anna}"}
    guarded.http.put(PATH, content=ARCHIVE, headers=headers)
    document = {**JOB, "queue": "research", "workdir": {"archive": DIGEST}}
    with_archive = guarded.request("POST", "/v1/jobs", anna, document).json()["id"]
    without = guarded.job(anna, "research")
    guarded.tick()
    agents = {job: issue_agent_token(SECRET, job) for job in (with_archive, without)}
    problem(guarded.request("GET", PATH, anna), 403)
    problem(guarded.request("GET", f"{PATH}?job={with_archive}", agents[without]), 403)
    problem(guarded.request("GET", f"{PATH}?job={without}", agents[without]), 403)
    problem(guarded.request("GET", PATH, agents[with_archive]), 401)
    assert guarded.request("GET", f"{PATH}?job={with_archive}", agents[with_archive]).content == ARCHIVE
    assert guarded.request("GET", PATH, guarded.root).content == ARCHIVE


def test_a_machine_downloads_the_archives_of_its_jobs_only(guarded: AuthenticatedService, problem: Problem) -> None:
    other = gzip.compress(b"other", mtime=0)
    for content in (ARCHIVE, other):
        headers = {"Authorization": f"Bearer {guarded.root}"}
        guarded.http.put(path_of(content), content=content, headers=headers)
    credential = join(guarded, create_token(guarded)).json()["credential"]
    guarded.tick()
    gpus = {"min": 2, "max": 2}
    guarded.request("POST", "/v1/jobs", guarded.root, {**JOB, "gpus": gpus, "workdir": {"archive": digest_of(other)}})
    guarded.tick()  # takes the other node
    document = {**JOB, "gpu": "l4", "gpus": gpus, "workdir": {"archive": DIGEST}}
    job = guarded.request("POST", "/v1/jobs", guarded.root, document).json()["id"]
    problem(guarded.request("GET", PATH, credential), 403)
    guarded.tick()
    guarded.clock.move_to(guarded.clock.now_s() + 1.0)
    assert list(guarded.request("GET", f"/v1/jobs/{job}", guarded.root).json()["nodes"]) == ["m0"]
    assert guarded.request("GET", PATH, credential).content == ARCHIVE
    problem(guarded.request("GET", path_of(other), credential), 403)
    problem(guarded.request("GET", PATH, "ebm_invented"), 401)
