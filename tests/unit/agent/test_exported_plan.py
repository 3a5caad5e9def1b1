"""The plan of a generation in the words of its framework: its file, and the command of its ranks."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.agent.rank_environment import build_argv
from scheduler.agent.run_folder import AgentFolders
from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.domain.run_document import LaunchMode, MasterAddress, RunDocument
from tests.agent.runs import python_job
from tests.builders_plan_export import build_plan

MASTER = MasterAddress("10.0.0.1", 29501)
PLAN = build_plan(4, strategy=LayerStrategy(1, dp=2, zero=3, shard_group=2))
DEEPSPEED = replace(
    python_job("pass"), framework="deepspeed", plan=PLAN, command=("python", "{plan.file}", "--dp={plan.dp}")
)


def test_each_generation_has_the_file_of_its_own_plan(tmp_path: Path) -> None:
    folders, larger = AgentFolders(tmp_path), build_plan(4, strategy=LayerStrategy(1, dp=4, zero=3, shard_group=4))
    batches = []
    for generation, plan in ((1, PLAN), (2, larger)):
        document = replace(DEEPSPEED, generation=generation, plan=plan)
        folder = folders.folder(document.job_id, generation, document.node)
        folder.create(document)
        path = Path(folder.find_exported_plan(document))
        assert path == folder.path / "deepspeed.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        batches.append(json.loads(path.read_text(encoding="utf-8"))["train_batch_size"])
        argv = build_argv(document, MASTER, checkpoint_dir="/c", plan_file=str(path))
        assert argv == ("python", str(path), f"--dp={plan.stages[0].strategies[0].dp}")
    assert batches == [32, 64]


def test_placeholders_of_launcher_and_plan_are_filled_together() -> None:
    command = ("torchrun", "--nproc_per_node={nproc_per_node}", "train.py", "{plan.args}")
    document = replace(DEEPSPEED, framework="torchtitan", command=command, launch=LaunchMode.NODE)
    argv = build_argv(document, MASTER, checkpoint_dir="/c")
    assert argv[1] == "--nproc_per_node=1"
    assert argv[-1] == "activation-checkpoint:none"
    assert "{plan.args}" not in argv


def test_a_job_without_a_framework_keeps_its_words(tmp_path: Path) -> None:
    document = replace(DEEPSPEED, framework="")
    assert build_argv(document, MASTER, checkpoint_dir="/c") == document.command
    folder = AgentFolders(tmp_path).folder("a", 1, "n")
    assert folder.find_exported_plan(document) == ""


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (replace(DEEPSPEED, framework="newer"), "framework.*newer"),
        (replace(DEEPSPEED, plan=build_plan(2, 2)), "DeepSpeed cannot express"),
        (replace(DEEPSPEED, plan=None), "no plan"),
    ],
)
def test_a_plan_that_cannot_be_exported_creates_no_folder(tmp_path: Path, document: RunDocument, reason: str) -> None:
    folder = AgentFolders(tmp_path).folder("a", 1, "n")
    with pytest.raises(ValueError, match=reason):
        folder.create(document)
    assert not folder.path.exists()
