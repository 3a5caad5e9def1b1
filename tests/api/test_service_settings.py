"""The settings over HTTP: complete, with sources, for admins only, and without secrets."""

from __future__ import annotations

import re
from typing import Any

import pytest

from api.service_settings import mask_credentials
from scheduler.settings import Settings
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import ApiService

_SECRET_NAME = re.compile(r"secret|password|token|key")
_NAMES_OF_FILES = {"token_secret_file", "secrets_key_file", "image_pull_secrets"}
"""Settings that name a file or a Secret object, whose names are no secrets."""


def _settings(service: ApiService) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in service.get("/v1/settings")["items"]}


def test_all_settings_are_listed_with_value_default_and_source() -> None:
    service = ApiService(Settings(auth="off", allowed_hosts="service", events_kept_days=30))
    found = _settings(service)
    assert set(found) == set(Settings.model_fields)
    kept = found["events_kept_days"]
    assert (kept["value"], kept["default"], kept["source"]) == (30, 90, "environment")
    assert (kept["variable"], kept["secret"]) == ("EBBTIDE_EVENTS_KEPT_DAYS", False)
    assert found["port"]["source"] == "default"
    assert all(each["description"] for each in found.values())
    service.http.close()


def test_no_response_contains_a_secret() -> None:
    url = "postgresql+psycopg://ebbtide:s3cr/et@db:5432/ebbtide?password=s3cr/et"
    settings = Settings(
        auth="off",
        allowed_hosts="service",
        database_url=url,
        oidc_client_secret="s3cr/et",
        public_url="http://u:s3cr/et@x",
    )
    service = ApiService(settings)
    answer = service.http.get("/v1/settings")
    assert "s3cr" not in answer.text
    found = _settings(service)
    assert (found["oidc_client_secret"]["value"], found["oidc_client_secret"]["secret"]) == (None, True)
    assert found["database_url"]["value"] == "postgresql+psycopg://***@db:5432/ebbtide?***"
    service.http.close()


def test_every_setting_with_a_secret_is_marked() -> None:
    named = {name for name in Settings.model_fields if _SECRET_NAME.search(name)} - _NAMES_OF_FILES
    assert named == {name for name, info in Settings.model_fields.items() if info.repr is False}


def test_only_admins_read_settings() -> None:
    guarded = AuthenticatedService()
    for grant in ("viewer", "queue-admin"):
        assert guarded.request("GET", "/v1/settings", guarded.token("anna", grant)).status_code == 403
    assert guarded.request("GET", "/v1/settings", guarded.root).status_code == 200
    guarded.http.close()


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("sqlite:///ebbtide.sqlite", "sqlite:///ebbtide.sqlite"),
        ("https://prometheus:9090/path", "https://prometheus:9090/path"),
        ("https://user:p@ss@prometheus", "https://***@prometheus"),
        ("https://prometheus?token=a", "https://prometheus?***"),
        ("a@b", "a@b"),
    ],
)
def test_credentials_in_urls_are_masked(text: str, masked: str) -> None:
    assert mask_credentials(text) == masked
