"""Settings from the environment, and the secret of worker tokens."""

from __future__ import annotations

import threading
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.settings import Settings
from scheduler.token_secret import SECRET_BYTES, load_token_secret


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_PORT", "9000")
    monkeypatch.setenv("EBBTIDE_RUN_DIR", "/srv/run")
    monkeypatch.setenv("EBBTIDE_RECONFIGURATION_S_BY_MODEL", '{"gpt2": 12}')
    settings = Settings()
    assert settings.port == 9000
    assert settings.worker_url == "http://127.0.0.1:9000"
    assert settings.token_secret_path == Path("/srv/run/token.secret")
    assert settings.reconfiguration_s_by_model == {"gpt2": 12.0}


def test_public_url_replaces_the_listen_address_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_PUBLIC_URL", "https://ebbtide.example/")
    assert Settings().worker_url == "https://ebbtide.example"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "99999"),
        ("SEASON_S", "nan"),
        ("LEAVE_GRACE_S", "-1"),
        ("AGEING_S", "0"),
        ("GAIN_FACTOR", "inf"),
        ("RECONFIGURATION_S_BY_MODEL", '{"gpt2": -1}'),
        ("SOLVER_PROCESSES", "0"),
        ("PROMETHEUS_URL", "prometheus:9090"),
        ("PROMETHEUS_URL", "http://:9090"),
        ("PROMETHEUS_URL", "http://prometheus:9090/?query=up"),
        ("LOG_LEVEL", "LOUD"),
        ("OIDC_GROUPS", '{"ops": ["root"]}'),
        ("GPU_PRICES", '{"h100-80g": -1}'),
        ("CURRENCY", "dollars"),
    ],
)
def test_invalid_setting_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"EBBTIDE_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        Settings()


def test_every_setting_has_a_description_with_its_unit() -> None:
    units = {"_per_s": "per second", "_s": "seconds", "_bytes": "bytes", "_days": "days"}
    for name, field in Settings.model_fields.items():
        description = field.description or ""
        assert description.endswith("."), name
        unit = next((unit for suffix, unit in units.items() if name.endswith(suffix)), "")
        assert unit in description, name


def test_every_policy_setting_is_a_service_setting_with_the_same_default() -> None:
    settings, policy_settings = Settings(), PolicySettings()
    for field in fields(PolicySettings):
        assert getattr(settings, field.name) == getattr(policy_settings, field.name), field.name


def test_token_secret_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / "token.secret"
    secret = load_token_secret(path)
    assert len(secret) == SECRET_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_token_secret(path) == secret
    assert [file.name for file in path.parent.iterdir()] == ["token.secret"]


def test_concurrent_processes_load_the_same_token_secret(tmp_path: Path) -> None:
    secrets: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: secrets.append(load_token_secret(tmp_path / "secret"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets) == 8
    assert len(set(secrets)) == 1


def test_short_or_readable_token_secret_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="at least 32"):
        load_token_secret(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="0600"):
        load_token_secret(path)
