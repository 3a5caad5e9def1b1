"""Command line and environment of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.executors.rank_launch import (
    LaunchSpec,
    RankSlot,
    assign_rank_slots,
    build_argv,
    build_rank_environment,
    can_run_preloaded,
    filter_inherited,
)

BRIEFING = LaunchSpec(
    job_id="gpt-7f3a",
    generation=4,
    world_size=3,
    steps=200,
    store_host="127.0.0.1",
    store_port=29500,
    run_root="/var/ebbtide/run",
    run_dir="/var/ebbtide/run/jobs/gpt-7f3a/gen-4",
    plan_path="/var/ebbtide/run/jobs/gpt-7f3a/gen-4/plan.json",
    checkpoint_dir="/data/gpt",
    url="http://127.0.0.1:8787",
    token="ebt_secret",
    frozen_layers=9,
    checkpoint_step=120,
    checkpoint_interval_s=900.0,
    checkpoint_keep=2,
    env={"LR": "0.01", "WORLD_SIZE": "99"},
)
INHERITED = {
    "PATH": "/usr/bin",
    "LR": "0.5",
    "EBBTIDE_DATABASE_URL": "postgresql://user:password@host/db",
    "TORCHELASTIC_RUN_ID": "outer",
    "RANK": "7",
}


def test_rank_environment() -> None:
    assert build_rank_environment(BRIEFING, RankSlot(2, 1, "i0", 3), inherited=INHERITED) == {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PATH": "/usr/bin",
        "LR": "0.01",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "EBBTIDE_NODE": "i0",
        "EBBTIDE_JOB_ID": "gpt-7f3a",
        "EBBTIDE_GENERATION": "4",
        "EBBTIDE_URL": "http://127.0.0.1:8787",
        "EBBTIDE_TOKEN": "ebt_secret",
        "EBBTIDE_PLAN": "/var/ebbtide/run/jobs/gpt-7f3a/gen-4/plan.json",
        "EBBTIDE_CHECKPOINT_DIR": "/data/gpt",
        "EBBTIDE_RUN_DIR": "/var/ebbtide/run/jobs/gpt-7f3a/gen-4",
        "EBBTIDE_STEPS": "200",
        "EBBTIDE_FROZEN_LAYERS": "9",
        "EBBTIDE_CHECKPOINT_STEP": "120",
        "EBBTIDE_CHECKPOINT_INTERVAL_S": "900.0",
        "EBBTIDE_CHECKPOINT_KEEP": "2",
        "EBBTIDE_RUN_ROOT": "/var/ebbtide/run",
    }


def test_controller_settings_are_not_inherited() -> None:
    assert filter_inherited(INHERITED) == {"PATH": "/usr/bin", "LR": "0.5"}


def test_given_thread_counts_are_kept() -> None:
    place = RankSlot(0, 0, "t0", 0)
    assert build_rank_environment(BRIEFING, place, inherited={"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    own = replace(BRIEFING, env={"OMP_NUM_THREADS": "2"})
    assert build_rank_environment(own, place, inherited={"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "2"


def test_token_is_not_in_the_repr() -> None:
    assert "ebt_secret" not in repr(BRIEFING)


def test_rank_slots() -> None:
    assert assign_rank_slots((("t1", 3), ("t0", 2), ("t1", 1))) == (
        RankSlot(0, 0, "t1", 3),
        RankSlot(1, 0, "t0", 2),
        RankSlot(2, 1, "t1", 1),
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "-m", "train", "--python", "python"), ("/opt/python", "-m", "train", "--python", "python")),
        (("./train.sh", "--fast"), ("./train.sh", "--fast")),
    ],
)
def test_leading_python_becomes_the_interpreter(command: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert build_argv(command, python="/opt/python") == expected


def test_job_without_command_is_rejected() -> None:
    with pytest.raises(ValueError, match="command"):
        build_argv((), python="/opt/python")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "-m", "scheduler.trainer.train", "--steps", "3"), True),
        (("python", "-m", "scheduler.trainer"), True),
        (("python", "-m", "scheduler.trainers.train"), False),
        (("python", "-m", "train"), False),
        (("python", "train.py"), False),
        (("./python", "-m", "scheduler.trainer.train"), False),
        (("python", "-m"), False),
        ((), False),
    ],
)
def test_only_the_reference_trainer_is_forked(command: tuple[str, ...], expected: bool) -> None:
    assert can_run_preloaded(command) is expected
