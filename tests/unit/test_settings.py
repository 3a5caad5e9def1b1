"""Settings from the environment, and the secret of worker tokens."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from scheduler.settings import SECRET_BYTES, Settings, load_token_secret


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_PORT", "9000")
    monkeypatch.setenv("EBBTIDE_RUN_DIR", "/srv/run")
    settings = Settings()
    assert settings.port == 9000
    assert settings.worker_url == "http://127.0.0.1:9000"
    assert settings.token_secret_path == Path("/srv/run/token.secret")


def test_workers_are_told_the_public_url_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_PUBLIC_URL", "https://ebbtide.example/")
    assert Settings().worker_url == "https://ebbtide.example"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "99999"),
        ("SEASON_S", "nan"),
        ("LEAVE_GRACE_S", "-1"),
        ("SOLVER_PROCESSES", "0"),
        ("EXECUTOR", "magic"),
        ("PROMETHEUS_URL", "prometheus:9090"),
        ("PROMETHEUS_URL", "http://:9090"),
        ("PROMETHEUS_URL", "http://prometheus:9090/?query=up"),
        ("LOG_LEVEL", "LOUD"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"EBBTIDE_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        Settings()


def test_every_setting_says_what_it_is_for() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "token.secret"
    secret = load_token_secret(path)
    assert len(secret) == SECRET_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_token_secret(path) == secret
    assert [file.name for file in path.parent.iterdir()] == ["token.secret"]


def test_processes_that_start_at_once_agree_on_one_secret(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(load_token_secret(tmp_path / "secret"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_secret_that_others_may_read_or_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="at least 32"):
        load_token_secret(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="0600"):
        load_token_secret(path)
