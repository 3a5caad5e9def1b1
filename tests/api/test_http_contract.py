"""Headers that every HTTP client may rely on: Allow, If-None-Match, Deprecation and Sunset."""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import date
from email.utils import parsedate_to_datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from api import health
from api.http.dependencies import create_router
from api.http.deprecation import NOTICE_DAYS, deprecated
from api.identity.authorization import PUBLIC, requires
from scheduler.settings import Settings
from tests.api.conftest import ApiService, Problem

METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def test_a_refused_method_names_every_method_of_the_path(service: ApiService, problem: Problem) -> None:
    routes = [route for route in service.app.routes if isinstance(route, Route)]
    methods: defaultdict[str, set[str]] = defaultdict(set)
    for route in routes:
        methods[re.sub(r"{\w+(:path)?}", "x", route.path)] |= route.methods or set()
    for path, documented in methods.items():
        # A path such as /jobs/x:suspend is also that of a job, so its other methods answer 404.
        served = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
        for method in sorted(METHODS - served):
            answer = service.http.request(method, path)
            assert problem(answer, 405)["type"] == "urn:ebbtide:problem:method-not-allowed", (method, path)
            assert set(answer.headers["allow"].split(", ")) == documented, (method, path)
    assert len(methods) > 60


def test_a_snapshot_that_the_client_has_is_not_sent_again(fleet: ApiService) -> None:
    fleet.tick()
    first = fleet.http.get("/v1/snapshots/latest")
    etag = first.headers["etag"]
    for value in (etag, f'"other", W/{etag}', "*"):
        again = fleet.http.get("/v1/snapshots/latest", headers={"If-None-Match": value})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag), value
    fleet.submit()
    fleet.tick()
    newer = fleet.http.get("/v1/snapshots/latest", headers={"If-None-Match": etag})
    assert newer.status_code == 200
    assert newer.json()["generation"] == first.json()["generation"] + 1


def test_an_archive_that_the_client_has_is_not_sent_again(tmp_path: Path) -> None:
    service = ApiService(Settings(auth="off", allowed_hosts="service", archive_dir=tmp_path))
    path = f"/v1/archives/sha256:{sha256(b'archive').hexdigest()}"
    assert service.http.put(path, content=b"archive").status_code == 201
    first = service.http.get(path)
    assert (first.content, first.headers["content-type"]) == (b"archive", "application/gzip")
    plain = service.http.get(path, headers={"Accept": "application/octet-stream"})
    assert (plain.content, plain.headers["content-type"]) == (b"archive", "application/octet-stream")
    again = service.http.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_exactly_the_conditional_reads_document_304(service: ApiService) -> None:
    conditional, documented = set(), set()
    for methods in service.app.openapi()["paths"].values():
        for operation in methods.values():
            if "If-None-Match" in {parameter["name"] for parameter in operation.get("parameters", ())}:
                conditional.add(operation["operationId"])
            if "304" in operation["responses"]:
                documented.add(operation["operationId"])
    assert conditional == documented == {"get_latest_snapshot", "download_archive"}


@pytest.fixture
def old_route(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A deprecated route `/v1/old`, and its operation in the document."""
    router = create_router("service")

    @router.get("/old")
    @requires(PUBLIC)
    @deprecated(since=date(2026, 1, 1), sunset=date(2026, 7, 1), successor="/v1/jobs")
    def get_old_list() -> dict[str, int]:
        return {"items": 0}

    monkeypatch.setattr("api.app._ROUTERS", (health.router, router))
    service = ApiService()
    return {"service": service, "operation": service.app.openapi()["paths"]["/v1/old"]["get"]}


def test_a_deprecated_route_says_so_in_document_and_response(old_route: dict[str, Any]) -> None:
    service, operation = old_route["service"], old_route["operation"]
    assert operation["deprecated"] is True
    assert {"Deprecation", "Sunset", "Link"} <= operation["responses"]["200"]["headers"].keys()
    headers = service.http.get("/v1/old").headers
    assert headers["deprecation"] == "@1767225600"
    assert parsedate_to_datetime(headers["sunset"]).date() == date(2026, 7, 1)
    assert headers["link"] == '</v1/jobs>; rel="successor-version"'
    assert "deprecation" not in service.http.get("/healthz").headers


def test_a_route_cannot_go_before_the_notice_has_passed() -> None:
    with pytest.raises(ValueError, match=str(NOTICE_DAYS)):
        deprecated(since=date(2026, 1, 1), sunset=date(2026, 6, 29), successor="/v1/jobs")
