"""The training script of the documentation is the library's own example, and it runs."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

import ebbtide

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "your-own-script.md"


def test_the_tutorials_training_script_is_the_librarys_example_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    example = (ebbtide.__doc__ or "").partition("    import")[2].partition("\nWithout")[0]
    script = dedent(f"    import{example}").strip()
    assert script in TUTORIAL.read_text(encoding="utf-8"), indent(script, "  ")
    monkeypatch.setenv("EBBTIDE_STEPS", "3")
    saved: list[int] = []
    names: dict[str, Any] = {
        "build_or_load": lambda plan, folder: ("model", "optimizer", 0),
        "train_one_step": lambda model, optimizer: 1.0,
        "save": lambda model, optimizer, step: saved.append(step),
    }
    exec(script, names)
    names["main"]()
    assert saved == [3]
