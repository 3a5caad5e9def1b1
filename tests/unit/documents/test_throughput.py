"""Files of measured throughput: parsing and validation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.documents.throughput import ExecPlan, StepByGpuCount, StepByLocalBatch, StepByPlacement, read_throughput
from scheduler.documents.trace_files import TraceError

ELASTICFLOW = "gpu,file,global_batch_size,1,2,4\n"
RUBICK = "model,exec_plan,placement,iter_time,forward,overlap_sync,optimize,cpu_threads\n"
POLLUX_BY_PLACEMENT = "app,placement,local_bsz,step_time,sync_time\n"
POLLUX_BY_COUNT = "app,num_nodes,num_replicas,local_bsz,step_time,sync_time\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "profile.csv"
    path.write_text(text)
    return path


def parse_plan(tmp_path: Path, exec_plan: str, placement: str) -> ExecPlan:
    (step,) = read_throughput(write(tmp_path, RUBICK + f"gpt2,{exec_plan},{placement},1.5,1,1,1,\n"))
    assert isinstance(step, StepByPlacement)
    return step.plan


def test_iterations_per_second_become_seconds_and_failed_runs_are_skipped(tmp_path: Path) -> None:
    steps = read_throughput(write(tmp_path, ELASTICFLOW + "T4,bert.csv,384,0.5,0.0,\nA100,gpt2.csv,128,2,4,5\n"))
    assert steps[0] == StepByGpuCount("t4", "bert", 384, 1, 2.0)
    assert [(step.gpu, step.gpus) for step in steps[1:]] == [("a100-80g", 1), ("a100-80g", 2), ("a100-80g", 4)]


def test_placement_has_the_largest_node_first_and_failed_runs_are_skipped(tmp_path: Path) -> None:
    text = RUBICK + "gpt2,ga,35,0.85,158,801,115,\ngpt2,111,1,0.0,0,0,0,2.0\n"
    assert read_throughput(write(tmp_path, text)) == (StepByPlacement("a800-80g", "gpt2", (5, 3), ExecPlan(), 0.85),)


def test_plan_is_parsed_to_degrees_and_options(tmp_path: Path) -> None:
    assert parse_plan(tmp_path, "344", "888888") == ExecPlan(data=3, tensor=4, pipeline=4)
    assert parse_plan(tmp_path, "zero-dp", "44") == ExecPlan(zero=2)
    assert parse_plan(tmp_path, "zero-offload+gc", "4") == ExecPlan(zero=2, recompute=True, offload=True)
    assert parse_plan(tmp_path, "tp+ga", "4") == ExecPlan(data=1, tensor=0)
    assert [parse_plan(tmp_path, text, "4").is_data_parallel for text in ("ga", "tp+ga", "141")] == [True, False, False]


def test_steps_by_local_batch_are_read_with_or_without_a_placement(tmp_path: Path) -> None:
    on = read_throughput(write(tmp_path, POLLUX_BY_PLACEMENT + "ncf,142,32,0.5,0.25\n"))
    assert on == (StepByLocalBatch("t4", "ncf", 3, 7, (4, 2, 1), 32, 0.5, 0.25),)
    over = read_throughput(write(tmp_path, POLLUX_BY_COUNT + "ncf,6,24,32,0.5,0.25\n"))
    assert over == (StepByLocalBatch("t4", "ncf", 6, 24, (), 32, 0.5, 0.25),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed,of,light\n1,2,3\n", "line 1: columns: got 'speed, of, light'"),
        (ELASTICFLOW, "has no measured steps"),
        (ELASTICFLOW.replace("4", "many") + "T4,a.csv,1,1,1,1\n", "line 1: column 'many' is unknown"),
        (ELASTICFLOW + "T4,a.csv,0,1,1,1\n", "line 2: global_batch_size: got '0'"),
        (ELASTICFLOW + "T4,a.csv,8,fast,1,1\n", "line 2: 1: got 'fast'"),
        (RUBICK + "gpt2,345,888888,1,1,1,1,\n", "line 2: exec_plan: got '345'"),
        (RUBICK + "gpt2,magic,8,1,1,1,1,\n", "line 2: exec_plan: got 'magic'"),
        (RUBICK + "gpt2,ga,808,1,1,1,1,\n", "line 2: placement: got '808'"),
        (RUBICK + "gpt2,ga,8,-1,1,1,1,\n", "line 2: iter_time: got '-1'"),
        (POLLUX_BY_PLACEMENT + "ncf,1,32,0.5,0.75\n", "line 2: sync_time: got '0.75'"),
    ],
)
def test_invalid_file_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_throughput(write(tmp_path, text))
