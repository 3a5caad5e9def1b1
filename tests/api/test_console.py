"""The console's page and files, and the overview that it draws the fleet from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from api.explanations import PendingReasonCache
from api.overview import GENERATIONS_KEPT, NodeDeltas
from api.web_console import ConsoleFiles, load_console_files
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policy_sets import load_policy_set
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import JOB
from tests.builders import a_fleet, a_loan, a_snapshot

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


def test_the_page_is_revalidated_and_its_files_are_cached_forever(service: ApiService) -> None:
    page = service.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-cache"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert service.http.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
    version = page.headers["etag"].strip('"')
    script = service.http.get(f"/console/{version}/app.js")
    assert script.headers["cache-control"].endswith("immutable")
    assert f"/console/{version}/app.js" in page.text


def test_a_page_of_another_release_gets_uncached_files(service: ApiService, problem: Problem) -> None:
    assert service.http.get("/console/of-another-release/app.js").headers["cache-control"] == "no-cache"
    problem(service.http.get("/console/of-another-release/no-such.js"), 404)


def test_the_reference_loads_its_own_files_only(service: ApiService) -> None:
    page = service.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert 'href="/openapi.json"' in page.text  # for readers without scripts
    for foreign in ("http://", "https://", "<script>", "style="):
        assert foreign not in page.text
    loaded = re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text)
    assert len(loaded) == (4 if load_console_files().has_reference else 1)
    for path in loaded:
        assert service.http.get(path).status_code == 200, path
    again = service.http.get("/docs", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_reference_without_its_library_links_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.web_console._REFERENCE_FILES", {"swagger-ui.js": Path("/nowhere")})
    files = ConsoleFiles()
    assert not files.has_reference
    assert b"<script" not in files.reference
    assert b"/openapi.json" in files.reference


def test_only_files_of_the_console_are_served(service: ApiService, problem: Problem) -> None:
    for path in ("index.html", "%2e%2e/app.py", "..%2F..%2Fapp.py", "package.json", ""):
        problem(service.http.get(f"/console/any/{path}"), 404)


def test_the_page_has_no_inline_or_foreign_scripts(service: ApiService) -> None:
    page = service.http.get("/").text
    assert "http://" not in page
    assert "https://" not in page
    assert "<script>" not in page
    assert "style=" not in page


def test_the_overview_counts_the_fleet(fleet: ApiService) -> None:
    fleet.lend_all()
    fleet.submit("waits", gpus={"min": 64, "max": 64})
    fleet.tick()
    view = fleet.get("/v1/overview")
    assert {node["name"]: node["state"] for node in view["nodes"]} == {"i0": "lent", "i1": "lent", "t0": "training"}
    assert view["complete"]
    assert view["leader"]
    assert view["loans"] == {"active": 2}
    assert [job["name"] for job in view["waiting"]] == ["waits"]
    assert {pool["name"]: pool["gpus"] for pool in view["pools"]} == {"inference": 2, "training": 2}


def test_the_overview_since_a_generation_has_changed_nodes_only(fleet: ApiService) -> None:
    fleet.tick()
    before = fleet.get("/v1/overview")
    fleet.made("/v1/nodes/i0:cordon")
    fleet.tick()
    after = fleet.get("/v1/overview", generation=before["generation"])
    assert not after["complete"]
    assert [(node["name"], node["state"]) for node in after["nodes"]] == [("i0", "cordoned")]
    assert fleet.get("/v1/overview", generation=before["generation"] + 1_000)["complete"]


def test_pending_jobs_have_reasons(fleet: ApiService) -> None:
    fleet.submit("huge", gpus={"min": 64, "max": 64})
    fleet.submit("waits", gpus={"min": 96, "max": 96})
    fleet.tick()
    view = fleet.get("/v1/waiting", limit=1)
    assert [(job["name"], job["position"]) for job in view["items"]] == [("huge", 1)]
    assert "needs 64 GPUs" in view["items"][0]["reason"]["detail"]
    assert view["reasons"] == {"NoMatchingFlavor": 2}


def test_pending_jobs_of_one_queue(fleet: ApiService) -> None:
    fleet.create_queues("vision", "speech")
    for queue in ("vision", "speech"):
        fleet.submit(queue, queue=queue, gpus={"min": 64, "max": 64})
    fleet.tick()
    view = fleet.get("/v1/waiting", queue="vision")
    assert [job["name"] for job in view["items"]] == ["vision"]
    assert sum(view["reasons"].values()) == 1
    assert fleet.get("/v1/waiting", queue="none")["items"] == []


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"reason": "NoMatchingFlavor"}, ["huge", "other"]),
        ({"reason": "InsufficientGpus,NoMatchingFlavor", "gpu": "a100-80g"}, ["huge"]),
        ({"reason": "InsufficientGpus"}, []),
        ({"gpu": "h100-80g"}, ["huge", "other"]),
        ({"queue": "default"}, ["huge", "other"]),
    ],
)
def test_pending_jobs_are_filtered_before_the_limit(
    fleet: ApiService, filters: dict[str, str], names: list[str]
) -> None:
    fleet.submit("huge", gpus={"min": 64, "max": 64})
    fleet.submit("other", gpu="h100-80g")
    fleet.tick()
    view = fleet.get("/v1/waiting", limit=2, **filters)
    assert [job["name"] for job in view["items"]] == names
    assert view["reasons"] == {"NoMatchingFlavor": 2}


def test_unknown_reason_codes_are_rejected(fleet: ApiService) -> None:
    problem = fleet.refused("GET", "/v1/waiting?reason=InsufficientGpu")
    assert "InsufficientGpus" in str(problem["errors"])


def test_pending_jobs_of_other_queues_are_hidden() -> None:
    with (guarded := AuthenticatedService()).http:
        guarded.with_fleet()
        for queue in ("research", "vision"):
            document = {**JOB, "name": queue, "queue": queue, "gpus": {"min": 64, "max": 64}}
            assert guarded.request("POST", "/v1/jobs", guarded.root, document).status_code == 201
        guarded.tick()
        view = guarded.request("GET", "/v1/waiting", guarded.token("r", "viewer:research")).json()
    assert [job["name"] for job in view["items"]] == ["research"]
    assert sum(view["reasons"].values()) == 1


def test_polling_clients_share_an_expensive_dry_run() -> None:
    began_s, ended_s, before_s, after_s = 0.0, 1.0, 20.9, 21.1
    times = iter((began_s, ended_s, before_s, after_s, after_s))
    reasons = PendingReasonCache(load_policy_set("fifo"), clock_s=lambda: next(times))
    first, second = (_at(generation, a_snapshot(a_fleet(training=1, inference=0))) for generation in (1, 2))
    assert reasons.read(first).snapshot is first
    assert reasons.read(second).snapshot is first
    assert reasons.read(second).snapshot is second


def test_a_viewer_of_one_queue_sees_only_that_queue() -> None:
    with (guarded := AuthenticatedService()).http:
        guarded.with_fleet()
        for queue in ("research", "vision"):
            guarded.job(guarded.root, queue, name=queue)
        guarded.tick()
        view = guarded.request("GET", "/v1/overview", guarded.token("r", "viewer:research")).json()
    assert [queue["name"] for queue in view["queues"]] == ["research"]
    assert sum(view["jobs"].values()) == 1
    assert [node["name"] for node in view["nodes"]] == ["t0"]


def test_only_recent_generations_are_remembered() -> None:
    glances, fleet = NodeDeltas(), a_fleet(training=1, inference=1)
    first = _at(1, a_snapshot(fleet))
    glances.since(None, first)
    lent = _at(2, a_snapshot(fleet, loans=[a_loan("i0")]))
    assert [node["name"] for node in glances.since(1, lent).nodes] == ["i0"]
    for generation in range(3, 3 + GENERATIONS_KEPT):
        glances.since(None, _at(generation, lent))
    assert glances.since(1, lent).complete


def _at(generation: int, snapshot: Snapshot) -> Snapshot:
    return Snapshot(generation, 0.0, snapshot.pools, snapshot.nodes, loans=snapshot.loans)


def test_files_are_compressed_for_clients_that_accept_it(service: ApiService) -> None:
    sizes = {
        encoding: int(service.http.get("/", headers={"Accept-Encoding": encoding}).headers["Content-Length"])
        for encoding in ("gzip", "identity")
    }
    assert sizes["gzip"] < sizes["identity"] / 2
