"""The training script of the documentation is the library's own example, and it runs."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import yaml

import ebbtide
from scheduler.documents.job import parse_job
from scheduler.domain.job_account import OnResize

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


GUIDE = TUTORIAL.parents[1] / "how-to" / "make-a-loop-elastic.md"


def test_the_loop_of_the_guide_runs_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = GUIDE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    monkeypatch.setenv("EBBTIDE_CHECKPOINT_DIR", str(tmp_path))
    names: dict[str, Any] = {}
    exec(script, names)
    assert names["run"].step == 3 * 8
    assert (tmp_path / "step-24").is_dir()


@pytest.mark.parametrize(("folder", "lines_max"), [("nanogpt", 5), ("mingpt-ddp", 4), ("unmodified", 0)])
def test_examples_have_few_lines_for_ebbtide(folder: str, lines_max: int) -> None:
    text = (TUTORIAL.parents[2] / "examples" / "training" / folder / "train.py").read_text(encoding="utf-8")
    lines = text.partition('"""\n\n')[2].splitlines()
    marked = [line for line in lines if line.endswith("# Ebbtide")]
    assert len(marked) == lines_max
    unmarked = [line for line in lines if line not in marked]
    assert [line for line in unmarked if "ebbtide" in line or "run." in line] == []


@pytest.mark.parametrize("folder", ["nanogpt", "mingpt-ddp", "unmodified"])
def test_job_files_of_the_examples_are_valid(folder: str) -> None:
    text = (TUTORIAL.parents[2] / "examples" / "training" / folder / "job.yaml").read_text(encoding="utf-8")
    # The command line adds the archive of --workdir.
    spec = parse_job({**yaml.safe_load(text), "workdir": {"archive": f"sha256:{64 * '0'}"}})
    assert (spec.min_gpus, spec.max_gpus, spec.on_resize) == (1, 4, OnResize.CHECKPOINT)
    # A generation's working directory is deleted with it, so output goes to the directory of checkpoints.
    assert any("{checkpoint_dir}" in word for word in spec.command) == (folder != "mingpt-ddp")
