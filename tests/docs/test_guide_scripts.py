"""Python and diff blocks of guides do what the guides say."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cli.app import app
from ebbtide.checkpoints import save_checkpoint
from scheduler.domain.parallel_plan import LayerStrategy, plan_to_json
from scheduler.scheduling import policy_sets
from scheduler.scheduling.policies.job_order import shortest_job_first
from scheduler.trainer.model import SIZES
from scheduler.trainer.user_code import load_function, load_samples
from tests.builders_resharding import a_plan
from tests.docs.python_blocks import GUIDES, read_diffs, read_python_blocks
from tests.docs.shell_blocks import read_blocks


def test_the_script_of_checkpoints_loads_what_it_saved(tmp_path: Path) -> None:
    (script,) = read_python_blocks("use-checkpoints")
    names: dict[str, Any] = {"state": {"weight": torch.ones(3)}, "folder": tmp_path}
    exec(script, names)
    assert names["step"] == 0
    names["state"] = {"weight": torch.zeros(3)}
    exec(script, names)
    assert names["step"] == 1000
    assert names["state"]["weight"].tolist() == [1.0, 1.0, 1.0]


def test_the_commands_of_checkpoints_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {f"h.{layer}.mlp.c_fc.weight": torch.ones(4, 16) for layer in range(2)}
    save_checkpoint({"model": weights}, tmp_path / "PATH", step=1)
    Path("config.json").write_text("{}")
    plan = a_plan([[LayerStrategy(layers=2, tp=2)]])
    Path("plan.json").write_text(json.dumps(plan_to_json(plan)))
    commands = [line for block in read_blocks(GUIDES / "use-checkpoints.md") for line in block.script.splitlines()]
    for program, *words in map(shlex.split, commands):
        result = CliRunner().invoke(app, words)
        assert (program, result.exit_code) == ("ebbtide", 0), (words, result.output)
    assert {path.name for path in tmp_path.iterdir()} >= {"weights.safetensors", "state.pt", "my-model", "TARGET"}


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the working directory, which a test writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = "module_of_the_guide"
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_the_policy_of_the_guide_is_found_by_its_entry_point(
    own_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = read_python_blocks("write-a-policy")
    (tmp_path / f"{own_module}.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    found = (EntryPoint("mine", f"{own_module}:mine", policy_sets.ENTRY_POINTS),)
    monkeypatch.setattr(policy_sets, "find_entry_points", lambda: found)
    policy = policy_sets.load_policy_set("mine")
    assert (policy.name, policy.order) == ("mine", shortest_job_first)
    assert "mine" in policy_sets.list_policy_sets()


def test_the_trainer_loads_the_dataset_and_the_hook_of_the_guide(own_module: str, tmp_path: Path) -> None:
    script = "\n".join(read_python_blocks("use-the-reference-trainer"))
    (tmp_path / f"{own_module}.py").write_text(script.replace("/data/", f"{tmp_path}/"))
    size = SIZES["nano-gpt"]
    torch.save(torch.arange(4 * size.sequence + 1) % 256, tmp_path / "tokens.pt")
    samples = load_samples("--dataset", f"{own_module}:build", size=size, seed=0)
    inputs, targets = samples.load_samples(range(4))
    assert inputs.shape == (4, size.sequence)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    load_function("--evaluation-hook", f"{own_module}:record")(8, 2.5)
    assert (tmp_path / "evaluations.csv").read_text() == "8,2.5\n"


_BEFORE_LOOP = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=False)
max_iters, ddp, drawn = 3, False, []
def get_batch(split):
    drawn.append(torch.randn(2, 4))
    return drawn[-1], split
"""
_BODY = """
    model(X).square().mean().backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    X, Y = get_batch('train')
    iter_num += 1
"""
"""Short form of one iteration of nanoGPT's loop."""


def test_the_changes_of_the_flat_script_make_a_loop_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports, start, loop, end = (_apply(diff) for diff in read_diffs("make-a-loop-elastic"))
    script = "\n".join([imports, _BEFORE_LOOP, start, loop, _BODY, end])
    monkeypatch.setenv("EBBTIDE_CHECKPOINT_DIR", str(tmp_path))
    names: dict[str, Any] = {}
    exec(script, names)
    assert names["run"].step == 4  # nanoGPT's iterations are 0 to max_iters
    assert (tmp_path / "step-4").is_dir()
    again: dict[str, Any] = {}
    exec(script.replace("max_iters, ddp, drawn = 3", "max_iters, ddp, drawn = 5"), again)
    assert again["run"].step == 6
    assert torch.equal(again["drawn"][0], names["drawn"][-1])


def _apply(diff: str) -> str:
    """Return the lines of a diff after the change."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
