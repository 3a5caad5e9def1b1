"""Traces that cannot be played: exit 2, the file and the line in one sentence, and no part of a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]

HEAD = "job_id,submit_time_s,duration_s,gpus\n"
FILES = {
    "jobs.csv": HEAD + "a,0,100,1\nb,10,50,2\n",
    "demand.csv": "time_s,pool,gpus\n0,inference,1\n300,inference,0\n",
    "cluster.yaml": "pools:\n"
    "  - {name: training, kind: training, nodes: 2, gpus_per_node: 4, gpu: t4}\n"
    "  - {name: inference, kind: inference, nodes: 1, gpus_per_node: 4, gpu: t4}\n",
    "profile.csv": "gpu,file,global_batch_size,1,2\nT4,ncf.csv,32768,46.9,37.6\n",
}
SIMULATE = ("simulate", "--jobs", "jobs.csv", "--demand", "demand.csv", "--cluster", "cluster.yaml", "-o", "json")
SAMPLED = "time_s,pool,gpus\n" + "".join(f"{300 * at},inference,1\n" for at in range(25))
POLLUX = "workload,name,submit_time_s,application,num_gpu_user,batch_size\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)


def read_message(result: Result) -> str:
    return str(json.loads(result.stderr)["error"]["message"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("jobs.csv", HEAD + "a,0,100,1\nb,10,,2\n", "jobs.csv line 3: duration_s: got ''"),
        ("jobs.csv", HEAD + "a,0,100,1\nb,10,50\n", "jobs.csv line 3: has 3 cells; allowed: 4"),
        ("jobs.csv", HEAD + "a,10,100,1\nb,0,50,2\n", "jobs.csv line 3: submit_time_s: got '0'"),
        ("jobs.csv", HEAD + "a,0,100,1\nb,10,0,2\n", "jobs.csv line 3: duration_s: got '0'"),
        ("jobs.csv", HEAD + "a,0,100,1\nb,10,50,9\n", "jobs.csv line 3: gpus: got 9"),
        ("jobs.csv", HEAD + "a,0,100,1\na,10,50,2\n", "jobs.csv line 3: job_id: got 'a'"),
        ("jobs.csv", POLLUX + "w,a,0,ncf,1,32768\n", "jobs.csv line 2: application: got 'ncf'"),
        ("jobs.csv", "", "jobs.csv line 1: is empty; allowed: a header with column names"),
        ("jobs.csv", HEAD, "jobs.csv line 1: the file has no rows; add at least one job"),
        (
            "jobs.csv",
            "job_id,gpus,user\n",
            "'submit_time_s' is missing; allowed: job_id, submit_time_s, duration_s, gpus; optional",
        ),
        ("jobs.csv", HEAD + 'a,0,100,1\n"b,10,50,2\n', "jobs.csv line 3: cannot be read: unexpected end of data"),
        ("jobs.csv", HEAD + "a,0,100,1_0\n", "jobs.csv line 2: gpus: got '1_0'"),
        ("jobs.csv", HEAD + "a,0,1_00,1\n", "jobs.csv line 2: duration_s: got '1_00'"),
        ("jobs.csv", HEAD + "a,0,1e300,1\n", "jobs.csv line 2: duration_s: got '1e+300'"),
        (
            "jobs.csv",
            HEAD + "a,0,9,1\nb,1.6e9,9,1\n",
            "jobs.csv line 3: submit_time_s: got '1.6e+09'",
        ),
        (
            "jobs.csv",
            HEAD + "a,100000,9,1\n",
            "demand.csv line 3: time_s: got '300'",
        ),
        ("demand.csv", "", "demand.csv line 1: is empty"),
        ("demand.csv", "time_s,pool,gpus\n", "demand.csv line 1: the file has no rows; add at least one demand"),
        (
            "demand.csv",
            "time_s,pool,gpus\n" + "".join(f"{at},inference,1\n" for at in (0, 300, 600, 900, 1800)),
            "demand.csv line 6: time_s: got '1800'",
        ),
        (
            "demand.csv",
            SAMPLED + "8100,inference,1\n",
            "demand.csv line 27: time_s: got '8100'",
        ),
        ("demand.csv", "time_s,pool,gpus\n0,inference,\n", "demand.csv line 2: gpus: got ''"),
        ("demand.csv", "time_s,pool,gpus\n9,inference,1\n3,inference,1\n", "demand.csv line 3: time_s: got '3'"),
        ("demand.csv", "time_s,pool,gpus\n0,chat,1\n", "demand.csv line 2: pool: got 'chat'"),
        ("demand.csv", "time_s,fn0,fn1\n0,1,\n", "demand.csv line 2: fn1: got ''"),
        ("demand.csv", "time_s,fn0,fn1\n0,1,2\n", "demand.csv line 1: no demand of pool inference: got fn0, fn1"),
        ("demand.csv", "time_s,pool,load\n0,inference,0\n", "demand.csv line 2: load: pool inference has no peak_gpus"),
        ("cluster.yaml", "", "cluster.yaml line 1: document: got nothing"),
        ("cluster.yaml", "pools: [", "cluster.yaml line 1: is not YAML: expected the node content"),
        ("cluster.yaml", "pools:\n\t- x\n", "cluster.yaml line 2: is not YAML: found character '\\t' that"),
        ("cluster.yaml", "pools: 2020-13-45\n", "cluster.yaml: is not YAML: month must be in 1..12"),
        ("cluster.yaml", FILES["cluster.yaml"] * 2, "cluster.yaml line 4: pools: duplicate key"),
        (
            "cluster.yaml",
            FILES["cluster.yaml"].replace("nodes: 1,", "nodes: 1, nodes: 3,"),
            "cluster.yaml line 3: nodes: duplicate key",
        ),
        (
            "cluster.yaml",
            FILES["cluster.yaml"].replace("4, gpu: t4}\n  - {name: inf", "4, gpu: t4}\n  - {name: Inf"),
            'cluster.yaml line 3: pools.1.name: got "Inference"',
        ),
        (
            "cluster.yaml",
            FILES["cluster.yaml"] + "  - {name: other, kind: inference, nodes: 1, gpus_per_node: 4, gpu: t4}\n",
            "demand.csv line 1: no demand of pool other: got inference",
        ),
        (
            "cluster.yaml",
            FILES["cluster.yaml"].replace(
                "nodes: 1, gpus_per_node: 4, gpu: t4", "nodes: 1, gpus_per_node: 4, gpu: gtx"
            ),
            "cluster.yaml line 3: pools.1.gpu: got 'gtx'",
        ),
        (
            "cluster.yaml",
            FILES["cluster.yaml"].replace("name: inference", "name: training"),
            'cluster.yaml line 3: pools.1.name: got "training"; allowed: a name that no other pool has',
        ),
    ],
)
def test_invalid_trace_is_rejected_before_simulating(run: Run, name: str, text: str, message: str) -> None:
    Path(name).write_text(text)
    result = run(*SIMULATE, "--policy", "ebbtide,fifo", "--report", "report")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.count("\n") == 1
    assert message in read_message(result)
    assert not Path("report").exists() or not list(Path("report").iterdir()), "a part of a report"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "w1"), "jobs.csv: workload: got 'w1'"),
        (("--profiles", "none.csv"), "none.csv: cannot be read"),
        (("--profiles", "jobs.csv"), "jobs.csv line 1: columns: got 'job_id, submit_time_s"),
    ],
)
def test_invalid_option_is_rejected(run: Run, words: tuple[str, ...], message: str) -> None:
    result = run(*SIMULATE, "--policy", "fifo", *words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in read_message(result)


def test_measured_profile_provides_durations_of_a_trace_without_them(run: Run) -> None:
    Path("jobs.csv").write_text(POLLUX + "w1,a,0,ncf,1,32768\nw2,a,5,ncf,1,32768\n")
    words = ("--policy", "fifo", "--profiles", "profile.csv")
    assert '"jobs": 2' in run(*SIMULATE, *words).stdout
    alone = run(*SIMULATE, *words, "--workload", "w2")
    assert (alone.exit_code, '"jobs": 1' in alone.stdout) == (0, True), alone.output


def test_job_above_its_queue_limit_is_rejected(run: Run) -> None:
    Path("cluster.yaml").write_text(FILES["cluster.yaml"] + "queues:\n  - {name: lab, limit_gpus: 2}\n")
    Path("jobs.csv").write_text("job_id,submit_time_s,duration_s,gpus,queue\na,0,9,2,lab\nb,0,9,3,lab\n")
    result = run(*SIMULATE, "--policy", "fifo")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "jobs.csv line 3: gpus: got 3" in result.stderr


def test_load_that_is_always_zero_is_rejected(run: Run) -> None:
    Path("cluster.yaml").write_text(FILES["cluster.yaml"].replace("kind: inference,", "kind: inference, peak_gpus: 4,"))
    Path("demand.csv").write_text("time_s,pool,load\n0,inference,0\n300,inference,0\n")
    result = run(*SIMULATE, "--policy", "fifo")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "demand.csv line 2: load: got '0' in all rows of pool inference" in result.stderr


def test_directory_or_corrupt_archive_is_rejected(run: Run) -> None:
    Path("jobs.csv.gz").write_text("a")
    Path("folder").mkdir()
    for name, why in (
        ("folder", "Is a directory"),
        ("none.csv", "No such file"),
        ("jobs.csv.gz", "Not a gzipped file"),
    ):
        result = run(*SIMULATE, "--policy", "fifo", "--jobs", name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{name}: cannot be read: {why}" in read_message(result)


def test_trace_from_a_spreadsheet_is_read(run: Run) -> None:
    """With a byte order mark, carriage returns and an empty line at the end."""
    Path("jobs.csv").write_bytes(b"\xef\xbb\xbf" + FILES["jobs.csv"].replace("\n", "\r\n").encode() + b"\r\n")
    result = run(*SIMULATE, "--policy", "fifo")
    assert (result.exit_code, '"jobs": 2' in result.stdout) == (0, True), result.output


def test_demand_reported_on_change_has_no_gaps(run: Run) -> None:
    Path("demand.csv").write_text("time_s,pool,gpus\n" + "".join(f"{at**3},inference,{at % 3}\n" for at in range(15)))
    assert run(*SIMULATE, "--policy", "fifo").exit_code == 0
