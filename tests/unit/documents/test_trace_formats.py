"""Published trace formats: recognition by header, parsing and validation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.documents.trace_files import DemandRow, JobRow, TraceError, read_demand, read_jobs

MURI = "job_id,submit_time_s,duration_s,gpus,model,batch_size,iterations,priority\n"
ELASTICFLOW = "job_id,submit_time_s,iterations,model,deadline_s,batch_size,gpus,duration_s\n"
POLLUX = "workload,name,submit_time_s,application,num_gpu_user,batch_size\n"
RUBICK = "name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (
            MURI + "7,1456.0,926133.0,4,resnet18,128,1005573,1\n",
            JobRow(2, "7", 1456.0, 926133.0, 4, global_batch=128, iterations=1005573, application="resnet18"),
        ),
        (
            ELASTICFLOW + "0,3715485,2011,cifar10,3719996,4096,1,5644\n",
            JobRow(
                *(2, "0", 3715485.0, 5644.0, 1),
                global_batch=4096, deadline_s=3719996.0, iterations=2011, application="cifar10",
            ),
        ),
        (
            POLLUX + "workload-1,ncf-2,135.0,ncf,1,32768\n",
            JobRow(
                *(2, "workload-1-ncf-2", 135.0, 0.0, 1), global_batch=32768, iterations=1548, application="ncf"
            ),
        ),
        (
            RUBICK + "llama30-1,1639,142.2190972,llama30,48,384,1.25,344,64,0\n",
            JobRow(
                *(2, "llama30-1", 1639.0, 142.2190972, 48), global_batch=4, iterations=64, application="llama30"
            ),
        ),
        (
            RUBICK + "vit-0,0,10,vit,2,16,0.0,zero-dp,37,1\n",
            JobRow(
                *(2, "vit-0", 0.0, 10.0, 2), global_batch=64, queue="sla", iterations=37, application="vit"
            ),
        ),
    ],
)  # fmt: skip
def test_job_is_parsed_in_each_format(tmp_path: Path, text: str, row: JobRow) -> None:
    assert read_jobs(write(tmp_path, text)) == (row,)


def test_file_with_several_workloads_is_read_completely_or_by_workload(tmp_path: Path) -> None:
    path = write(tmp_path, POLLUX + "w1,a,100,ncf,1,32768\nw1,b,300,ncf,1,32768\nw2,a,200,ncf,1,32768\n")
    assert [row.job_id for row in read_jobs(path)] == ["w1-a", "w2-a", "w1-b"]
    assert [row.job_id for row in read_jobs(path, workload="w2")] == ["w2-a"]
    with pytest.raises(TraceError, match="workload: got 'w3'"):
        read_jobs(path, workload="w3")
    with pytest.raises(TraceError, match="workload: got 'w1'"):
        read_jobs(write(tmp_path, MURI + "7,1456.0,9.0,4,resnet18,128,10,1\n"), workload="w1")


def test_columns_can_have_any_order_but_none_can_be_missing(tmp_path: Path) -> None:
    reordered = "model,job_id,submit_time_s,duration_s,gpus,batch_size,iterations,priority\nbert,7,0,9,4,4,10,1\n"
    (row,) = read_jobs(write(tmp_path, reordered))
    assert (row.job_id, row.application, row.priority) == ("7", "bert", 0)
    with pytest.raises(TraceError, match="line 1: column 'batch_size' is unknown"):
        read_jobs(write(tmp_path, MURI.replace(",priority", "")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MURI + "7,0,0,4,bert,4,10,1\n", "line 2: duration_s: got '0'"),
        (MURI + "7,0,9,4,,4,10,1\n", "line 2: model: got ''"),
        (MURI + "7,0,9,4,bert,4,10,\n", "line 2: priority: got ''"),
        (MURI + "7,5,9,4,bert,4,10,1\n8,4,9,4,bert,4,10,1\n", "line 3: submit_time_s: got '4'"),
        (ELASTICFLOW + "0,10,2011,cifar10,9,4096,1,5\n", "line 2: deadline_s: got '9'"),
        (ELASTICFLOW + "0,10,,cifar10,90,4096,1,5\n", "line 2: iterations: got ''"),
        (POLLUX + "w,a,0,ncf,1,64\n", "line 2: application: got 'ncf'"),
        (POLLUX + "w,a,5,ncf,1,32768\nw,b,4,ncf,1,32768\n", "line 3: submit_time_s: got '4'"),
        (RUBICK + "a,0,10,opt,2,16,0.0,ga,37,0\n", "line 2: application: got 'opt'"),
        (RUBICK + "a,0,10,vit,2,16,0.0,ga,0,0\n", "line 2: steps: got '0'"),
    ],
)
def test_invalid_row_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_jobs(write(tmp_path, text))


def test_every_column_of_a_wide_file_is_a_series(tmp_path: Path) -> None:
    rows = read_demand(write(tmp_path, "time_s,fn0,fn1\n0,2.5,0\n300,2,0.5\n"))
    assert rows[:2] == (DemandRow(2, 0.0, "fn0", 2.5, True, True), DemandRow(2, 0.0, "fn1", 0.0, True, True))
    assert [(row.time_s, row.pool, row.amount) for row in rows[2:]] == [(300.0, "fn0", 2.0), (300.0, "fn1", 0.5)]


def test_timestamps_become_seconds_since_the_first(tmp_path: Path) -> None:
    rows = read_demand(write(tmp_path, "timestamp,IBM\n2015-02-28 23:55:00,1\n2015-03-01 00:00:00,2\n"))
    assert [row.time_s for row in rows] == [0.0, 300.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_s,fn0,fn1\n0,2.5,\n", "line 2: fn1: got ''"),
        ("time_s,fn0\n300,1\n0,1\n", "line 3: time_s: got '0'"),
        ("timestamp,IBM\n2015-02-30 00:00:00,1\n", "line 2: timestamp: got '2015-02-30 00:00:00'"),
        ("timestamp,IBM\n2015-02-02 00:00:00,1\n2015-02-01 00:00:00,1\n", "line 3: timestamp: got '2015-02-01"),
        ("when,fn0\n0,1\n", "line 1: column 'time_s' is missing"),
        ("time_s\n0\n", "line 1: column 'pool' is missing"),
    ],
)
def test_invalid_wide_file_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_demand(write(tmp_path, text))
