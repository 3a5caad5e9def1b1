"""The batch script of a pilot, against a stored one, and the lines of squeue."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.slurm.pilot_script import TOKEN_VARIABLE, NodeShare, PilotJob, render_pilot
from scheduler.slurm.slurm_client import SlurmJob, parse_job

GOLDEN = Path(__file__).with_name("pilot.sh")
PILOT = PilotJob(
    pool="training",
    nodes=4,
    url="https://ebbtide.example",
    command=("/opt/ebbtide/bin/python", "-P", "-m", "cli"),
    partition="gpu",
    time_limit="1-00:00:00",
    share=NodeShare(gpus=8),
    log="/home/alice/my logs/pilot-%j.log",
    agent_options=("--writable", "/scratch/alice's data"),
    sbatch_options=("--account=research",),
)


def test_script_is_the_stored_one() -> None:
    script = render_pilot(PILOT)
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        GOLDEN.write_text(script)
    assert script == GOLDEN.read_text()
    assert TOKEN_VARIABLE not in script


def test_options_that_are_not_stated_are_left_to_slurm() -> None:
    script = render_pilot(PilotJob("training", 1, "http://127.0.0.1:8787", ("ebbtide",)))
    assert not any(f"#SBATCH {option}" in script for option in ("--partition", "--time", "--gpus-per-node", "--output"))


@pytest.mark.parametrize(
    ("share", "stated", "absent"),
    [
        (NodeShare(), ["--exclusive", "--mem=0", "SLURM_GPUS_ON_NODE"], ["--gpus "]),
        (NodeShare(gpus=8), ["--exclusive", "--mem=0", "--gpus-per-node=8"], ["SLURM_GPUS_ON_NODE"]),
        (NodeShare(unmanaged_gpus=8), ["--exclusive", "--gpus 8"], ["--gpus-per-node"]),
        (
            NodeShare(gpus=2, cpus_per_gpu=12, memory_per_gpu="120G"),
            ["--gpus-per-node=2", "--cpus-per-gpu=12", "--mem-per-gpu=120G"],
            ["--exclusive", "--mem=0"],
        ),
    ],
)
def test_pilot_requests_whole_nodes_unless_it_states_cpus_or_memory(
    share: NodeShare, stated: list[str], absent: list[str]
) -> None:
    script = render_pilot(replace(PILOT, share=share))
    assert [text for text in stated if text not in script] == []
    assert [text for text in absent if text in script] == []


def test_stated_memory_replaces_that_of_the_whole_node() -> None:
    assert "--mem=0" not in render_pilot(replace(PILOT, sbatch_options=("--mem=64G",)))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"gpus": 8, "unmanaged_gpus": 8}, "--node-gpus"),
        ({"cpus_per_gpu": 4}, "--cpus-per-gpu"),
        ({"memory_per_gpu": "8G", "unmanaged_gpus": 8}, "--mem-per-gpu"),
    ],
)
def test_contradicting_shares_are_rejected(arguments: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}: "):
        NodeShare(**arguments)


def test_lines_of_squeue_are_parsed() -> None:
    columns = ("17", "ebbtide-training", "RUNNING", "2", "1795586558", "n[1-2]")
    job = parse_job("".join(column.ljust(250) for column in columns))
    assert job == SlurmJob("17", "ebbtide-training", "RUNNING", 2, 1795586558.0, "n[1-2]")
    assert job.pool == "training"
    pending = parse_job("".join(column.ljust(250) for column in (*columns[:4], "N/A", "(Resources)")))
    assert (pending.end_s, pending.place) == (None, "(Resources)")
