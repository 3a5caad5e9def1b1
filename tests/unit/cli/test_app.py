"""The command table: its summaries match the commands, and importing stays cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli.app import SUBCOMMANDS, Subcommand, app, load_command

ROOT = Path(__file__).resolve().parents[3]
SLOW_PACKAGES = ("httpx", "rich", "pydantic", "numpy", "fastapi", "sqlalchemy", "matplotlib", "torch")


def import_in_fresh_process(statement: str) -> set[str]:
    """Run a statement in a new process and return the slow packages that it imported."""
    report = f"import sys; print(*(name for name in {SLOW_PACKAGES!r} if name in sys.modules))"
    command = [sys.executable, "-c", f"{statement}\n{report}"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("subcommand", SUBCOMMANDS, ids=lambda each: each.name)
def test_summary_is_the_first_sentence_of_the_help(subcommand: Subcommand) -> None:
    command = load_command(subcommand)
    assert command.name == subcommand.name
    assert " ".join(command.help.split()).startswith(subcommand.summary)


def test_table_has_every_command_once() -> None:
    names = [each.name for each in SUBCOMMANDS]
    assert list(typer.main.get_group(app).commands) == names
    assert len(set(names)) == len(names)


def test_overview_imports_no_slow_package() -> None:
    assert import_in_fresh_process("from cli.app import app") == set()


def test_client_imports_no_server_package() -> None:
    assert import_in_fresh_process("import cli.commands.jobs, ebbtide.client") <= {"httpx", "rich"}
