"""The command line of the agent that `ebbtide serve` starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.composition.service_machine import build_agent_command
from scheduler.settings import Settings


def test_tokens_that_the_user_has_saved_are_hidden_from_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    words = build_agent_command(Settings(run_dir=tmp_path / "run"), ["ebbtide"])
    hidden = [words[at + 1] for at, word in enumerate(words) if word == "--hide"]
    assert {str(tmp_path / "config" / "ebbtide"), str(tmp_path / "run")} <= set(hidden)
