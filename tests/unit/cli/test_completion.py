"""What a shell is offered after TAB: verbs, options, and the names of what the service has."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app


def offered(words: str) -> list[str]:
    """What bash shows after `ebbtide <words>` and TAB."""
    environment = {
        "_EBBTIDE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"ebbtide {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    return CliRunner().invoke(app, [], env=environment, prog_name="ebbtide").stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str) -> None:
    result = CliRunner().invoke(app, ["completion", shell], prog_name="ebbtide")
    assert result.exit_code == 0
    assert "_EBBTIDE_COMPLETE" in result.stdout


def test_verbs_and_options_are_offered() -> None:
    assert {"submit", "suspend"} <= set(offered("su"))
    assert "--global-batch" in offered("submit --gl")


def test_names_are_those_of_the_service(fleet: Any) -> None:
    with fleet.client() as client:
        job = client.submit({"name": "train", "gpus": {"min": 1, "max": 1}})
    assert offered("explain tr") == [job["id"]]
    assert offered("cordon i") == ["i0", "i1"]
    assert offered("nodes list --pool s") == ["serving"]


def test_without_a_service_nothing_is_offered_and_nothing_is_said() -> None:
    assert offered("explain tr") == []
