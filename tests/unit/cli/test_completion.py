"""Shell completion of commands, options and names of the service's resources."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app


def completions(words: str) -> list[str]:
    """Return what bash offers after `ebbtide <words>` and TAB."""
    environment = {
        "_EBBTIDE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"ebbtide {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    return CliRunner().invoke(app, [], env=environment, prog_name="ebbtide").stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    result = CliRunner().invoke(app, ["completion", shell], prog_name="ebbtide")
    assert result.exit_code == 0
    assert "_EBBTIDE_COMPLETE" in result.stdout


def test_commands_and_options_are_completed() -> None:
    assert {"submit", "suspend"} <= set(completions("su"))
    assert "--global-batch" in completions("submit --gl")


def test_names_of_the_service_are_completed(fleet: Any) -> None:
    with fleet.client() as client:
        job = client.submit({"name": "train", "gpus": {"min": 1, "max": 1}, "command": ["true"]})
    assert completions("explain tr") == [job["id"]]
    assert completions("cordon i") == ["i0", "i1"]
    assert completions("nodes list --pool s") == ["serving"]


def test_nothing_is_completed_without_a_service() -> None:
    assert completions("explain tr") == []
