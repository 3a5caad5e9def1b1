"""The state folder of a pilot: private, deleted at the end, and cleaned up after killed agents."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from scheduler.agent.agent_state import AgentState
from scheduler.slurm.pilot_folder import open_pilot_folder


def test_folder_is_private_and_deleted_at_the_end(tmp_path: Path) -> None:
    with open_pilot_folder("slurm-17-n1", parent=tmp_path / "new", token="ebj_secret") as folder:
        assert stat.S_IMODE(folder.state.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.token_file.stat().st_mode) == 0o600
        assert folder.token_file.read_text() == "ebj_secret"
    assert not list((tmp_path / "new").iterdir())


def test_only_folders_of_ended_agents_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pilot_folder("slurm-1-n1", parent=tmp_path, token="") as alive:
        state = AgentState(alive.state)
        left = tmp_path / "ebbtide-pilot-slurm-0-n1-x"
        left.mkdir()
        (left / "agent.lock").touch()
        starting = tmp_path / "ebbtide-pilot-slurm-2-n1-x"
        starting.mkdir()
        (tmp_path / "other").mkdir()
        with open_pilot_folder("slurm-3-n1", parent=tmp_path, token=""):
            assert not left.exists()
            assert alive.state.exists()
            assert starting.exists()
            assert (tmp_path / "other").exists()
        del state
