"""Measured runs as CSV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.parallel_plan import Recompute, ScheduleName
from scheduler.solver.calibration.measured_runs import MeasuredRunError, parse_measured_runs
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.training_software import AttentionKernel, LossKernel, TensorMessages, TrainingSoftware

A100 = load_gpu("a100-80g")
HEAD = "model,tensor,data,pipeline,micro_batch,global_batch,iteration_time_s"
ROW = "gpt2,2,4,1,2,64,0.25"


def test_row_can_name_a_shipped_model() -> None:
    (run,) = parse_measured_runs(f"{HEAD}\n{ROW}\n", A100)
    assert run.model == replace(
        load_model("gpt2"), software=TrainingSoftware(AttentionKernel.PROFILE, LossKernel.FUSED)
    )
    assert str(run.shape) == "1x8 a100-80g"
    assert (run.plan.micro_batches, run.plan.micro_batch_size, run.plan.world_size) == (8, 8, 8)
    assert (run.iteration_time_s, run.peak_bytes) == (0.25, 0)


def test_row_can_describe_an_architecture_and_a_full_plan() -> None:
    cells = {
        "layers": "24",
        "hidden": "1024",
        "heads": "16",
        "sequence_length": "2048",
        "vocabulary": "51200",
        "biases": "true",
        "tensor": "2",
        "data": "2",
        "pipeline": "4",
        "interleave": "3",
        "nodes": "2",
        "gpus": "16",
        "micro_batch": "1",
        "global_batch": "16",
        "recompute": "selective",
        "sequence_sharding": "true",
        "zero": "1",
        "attention": "flash-2",
        "loss": "stored",
        "tensor_messages": "overlapped",
        "iteration_time_s": "1.5e0",
        "peak_bytes": "30e9",
        "notes": "an example",
    }
    (run,) = parse_measured_runs(f"{','.join(cells)}\n{','.join(cells.values())}\n", A100)
    (strategy,) = run.plan.stages[0].strategies
    assert run.model.layers[0].parameters == 12 * 1024**2 + 13 * 1024
    assert (str(run.shape), run.plan.pipeline_devices, len(run.plan.stages)) == ("2x8 a100-80g", 4, 12)
    assert run.plan.schedule.name is ScheduleName.INTERLEAVED
    assert (strategy.layers, strategy.zero, strategy.shard_group) == (2, 1, 2)
    assert (strategy.recompute, strategy.sequence_sharding) == (Recompute.SELECTIVE, True)
    assert run.model.software == TrainingSoftware(AttentionKernel.FLASH_2, LossKernel.STORED, TensorMessages.OVERLAPPED)
    assert run.peak_bytes == 30_000_000_000


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("attention", "flash-9", "attention is 'flash-9'; allowed are profile, flash-1, flash-2, flash-3, newest"),
        ("expert_imbalance", "0.5", "model 'gpt2': expert_imbalance is 0.5; it must be at least 1"),
        ("expert_imbalance", "much", "expert_imbalance is 'much'; it must be a finite number above 0"),
        ("tensor_messages", "none", "tensor_messages is 'none'; allowed are exposed, overlapped"),
        ("loss", "fast", "loss is 'fast'; allowed are stored, fused"),
        ("model", "gpt9", "model is 'gpt9'; allowed are"),
        ("tensor", "3", "tp is 3; it must divide"),
        ("tensor", "two", "tensor is 'two'; it must be a whole number of at least 1"),
        ("pipeline", "99", "pipeline x interleave is 99; it must be at most the 12 layers"),
        ("micro_batch", "", "micro_batch is empty"),
        ("micro_batch", "3", "micro_batch x data is 12; it must divide global_batch, which is 64"),
        ("iteration_time_s", "nan", "iteration_time_s is 'nan'; it must be a finite number above 0"),
        ("iteration_time_s", "-1", "iteration_time_s is '-1'"),
        ("recompute", "some", "recompute is 'some'; allowed are none, selective, full"),
        ("offload", "1", "offload is '1'; allowed are false, true"),
        ("zero", "4", "zero is 4; it must be 0 to 3"),
        ("gpus", "4", "gpus is 4; the degrees multiply to 8"),
        ("nodes", "3", "nodes is 3; it must divide the 8 GPUs"),
        ("hidden", "64", "hidden is '64'; it must be empty beside model ('gpt2')"),
        ("peak_bytes", "0", "peak_bytes is '0'; it must be a whole number of at least 1"),
    ],
)
def test_invalid_cell_is_rejected_with_row_column_and_value(column: str, cell: str, message: str) -> None:
    cells = dict(zip(HEAD.split(","), ROW.split(","), strict=True)) | {column: cell}
    with pytest.raises(MeasuredRunError) as refused:
        parse_measured_runs(f"{','.join(cells)}\n{','.join(cells.values())}\n", A100)
    assert str(refused.value).startswith(f"row 2: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 'micro_batch' is missing"),
        (HEAD, "there are no runs"),
        (f"{HEAD},gpuz\n{ROW},1\n", "row 2: gpuz is '1'; it must be empty beside model ('gpt2')"),
        ("micro_batch,global_batch,iteration_time_s,hiden\n1,1,1,8\n", "row 2: architecture: field 'ffn' is missing"),
        ("micro_batch,global_batch,iteration_time_s,hidden\n1,1,1,x\n", "row 2: architecture: field 'ffn' is missing"),
        (f"{HEAD}\n{ROW},7\n", "row 2: has more cells than the header"),
        (f"{HEAD}\n{ROW}\n{ROW[:-4]}\n", "row 3: iteration_time_s is ''"),
    ],
)
def test_invalid_table_is_rejected(text: str, message: str) -> None:
    with pytest.raises(MeasuredRunError) as refused:
        parse_measured_runs(text, A100)
    assert str(refused.value).startswith(message)
