"""Whoever adds a setting has to say in README.md what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.settings import Settings

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_stands_in_a_table_of_the_readme(name: str) -> None:
    variable = f"EBBTIDE_{name.upper()}"
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("|")]
    assert any(f"`{variable}`" in row for row in rows), f"README.md has no table row for `{variable}`"
