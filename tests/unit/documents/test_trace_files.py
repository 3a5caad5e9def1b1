"""Trace files in Ebbtide's own format: parsing and validation."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from scheduler.documents.trace_files import DemandRow, JobRow, TraceError, read_demand, read_jobs

JOBS = "job_id,submit_time_s,duration_s,gpus\n"
DEMAND = "time_s,pool,load\n"


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_jobs_are_read_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    rows = read_jobs(write(tmp_path, JOBS + "a,0,10.5,1\n\nb,0,3,8\n", name))
    assert rows == (JobRow(2, "a", 0.0, 10.5, 1), JobRow(4, "b", 0.0, 3.0, 8))


def test_optional_columns_can_be_empty(tmp_path: Path) -> None:
    header = (
        "job_id,submit_time_s,duration_s,gpus,min_gpus,max_gpus,model,global_batch,priority,queue,deadline_s,gpu,user\n"
    )
    rows = read_jobs(write(tmp_path, header + "a,5,10,4,2,8,gpt2,64,1,research,100,cpu,ada\nb,5,10,4,,,,,,,,,\n"))
    assert rows[0] == JobRow(2, "a", 5.0, 10.0, 4, 2, 8, "gpt2", 64, 1, "research", 100.0, "cpu", user="ada")
    assert rows[1] == JobRow(3, "b", 5.0, 10.0, 4)


def test_demand_is_read_by_pool(tmp_path: Path) -> None:
    rows = read_demand(write(tmp_path, DEMAND + "0,chat,1.5\n0,code,7\n600,chat,0\n"))
    assert rows == (
        DemandRow(2, 0.0, "chat", 1.5, True),
        DemandRow(3, 0.0, "code", 7.0, True),
        DemandRow(4, 600.0, "chat", 0.0, True),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job_id,submit_time_s,gpus\n", "line 1: column 'duration_s' is missing"),
        ("job_id,submit_time_s,duration_s,gpus,speed\n", "line 1: column 'speed' is unknown"),
        ("job_id,submit_time_s,duration_s,gpus,gpus\n", "line 1: column 'gpus' is duplicated"),
        ("", "line 1: is empty"),
        (JOBS, "line 1: the file has no rows"),
        (JOBS + "a,0,10\n", "line 2: has 3 cells"),
        (JOBS + "a,0,10,1\nb,1,10,0\n", "line 3: gpus: got '0'"),
        (JOBS + "a,0,10,1.5\n", "line 2: gpus: got '1.5'"),
        (JOBS + "a,0,-3,1\n", "line 2: duration_s: got '-3'"),
        (JOBS + "a,0,nan,1\n", "line 2: duration_s: got 'nan'"),
        (JOBS + "a,inf,3,1\n", "line 2: submit_time_s: got 'inf'"),
        (JOBS + "a,x,3,1\n", "line 2: submit_time_s: got 'x'"),
        (JOBS + ",0,3,1\n", "line 2: job_id: got ''"),
        (JOBS + "a,5,3,1\nb,4,3,1\n", "line 3: submit_time_s: got '4'"),
        (JOBS + "a,5,3,1\na,6,3,1\n", r"line 3: job_id: got 'a'"),
        ("job_id,submit_time_s,duration_s,gpus,min_gpus,max_gpus\na,0,1,4,8,6\n", "line 2: min_gpus: got '8'"),
        ("job_id,submit_time_s,duration_s,gpus,max_gpus\na,0,1,4,2\n", "line 2: max_gpus: got '2'"),
        ("job_id,submit_time_s,duration_s,gpus,model\na,0,1,4,gpt2\n", "line 2: global_batch: got ''"),
        ("job_id,submit_time_s,duration_s,gpus,deadline_s\na,9,1,4,9\n", "line 2: deadline_s: got '9'"),
    ],
)
def test_invalid_job_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        read_jobs(write(tmp_path, text))
    assert "trace.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "time_s,pool,load,weather\n",
            "line 1: column 'weather' is unknown",
        ),
        (DEMAND, "line 1: the file has no rows"),
        (DEMAND + "0,chat,-1\n", "line 2: load: got '-1'"),
        (DEMAND + "0,chat,nan\n", "line 2: load: got 'nan'"),
        (DEMAND + "0,chat,\n", "line 2: gpus: got ''"),
        ("time_s,pool,load,gpus\n0,chat,1,1\n", "line 2: load: got '1'"),
        (DEMAND + "0,,1\n", "line 2: pool: got ''"),
        (DEMAND + "9,chat,1\n3,chat,1\n", "line 3: time_s: got '3'"),
        (DEMAND + "9,chat,1\n9,chat,1\n", "line 3: time_s: got '9'"),
    ],
)
def test_invalid_demand_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_demand(write(tmp_path, text))


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_jobs(tmp_path / "missing.csv")
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(b"this is not gzip")
    with pytest.raises(TraceError, match="cannot be read"):
        read_jobs(broken)
