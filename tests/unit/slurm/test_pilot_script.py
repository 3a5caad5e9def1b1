"""The batch script of a pilot, against a stored one, and the lines of squeue."""

from __future__ import annotations

import os
from pathlib import Path

from scheduler.slurm.pilot_script import TOKEN_VARIABLE, PilotJob, render_pilot
from scheduler.slurm.slurm_client import SlurmJob, parse_job

GOLDEN = Path(__file__).with_name("pilot.sh")
PILOT = PilotJob(
    pool="training",
    nodes=4,
    url="https://ebbtide.example",
    command=("/opt/ebbtide/bin/python", "-P", "-m", "cli"),
    partition="gpu",
    time_limit="1-00:00:00",
    gpus_per_node=8,
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
    assert not any(option in script for option in ("--partition", "--time", "--gpus-per-node", "--output"))


def test_lines_of_squeue_are_parsed() -> None:
    columns = ("17", "ebbtide-training", "RUNNING", "2", "1795586558", "n[1-2]")
    job = parse_job("".join(column.ljust(250) for column in columns))
    assert job == SlurmJob("17", "ebbtide-training", "RUNNING", 2, 1795586558.0, "n[1-2]")
    assert job.pool == "training"
    pending = parse_job("".join(column.ljust(250) for column in (*columns[:4], "N/A", "(Resources)")))
    assert (pending.end_s, pending.place) == (None, "(Resources)")
