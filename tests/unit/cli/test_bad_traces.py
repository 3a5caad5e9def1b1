"""Traces that cannot be played: exit 2, the file and the line in one sentence, and no part of a report."""

from __future__ import annotations

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
POLLUX = "workload,name,submit_time_s,application,num_gpu_user,batch_size\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("jobs.csv", HEAD + "a,0,100,1\nb,10,,2\n", "jobs.csv line 3: duration_s: got ''"),
        ("jobs.csv", HEAD + "a,0,100,1\nb,10,50\n", "jobs.csv line 3: has 3 cells, allowed is 4"),
        ("jobs.csv", HEAD + "a,10,100,1\nb,0,50,2\n", "jobs.csv line 3: submit_time_s: got '0'; allowed: at least 10"),
        ("jobs.csv", HEAD + "a,0,100,1\nb,10,0,2\n", "jobs.csv line 3: duration_s: got '0'; allowed: a finite number"),
        ("jobs.csv", HEAD + "a,0,100,1\nb,10,50,9\n", "jobs.csv line 3: gpus: got 9; allowed: at most 8"),
        ("jobs.csv", HEAD + "a,0,100,1\na,10,50,2\n", "jobs.csv line 3: job_id: got 'a'"),
        ("jobs.csv", POLLUX + "w,a,0,ncf,1,32768\n", "jobs.csv line 2: application: got 'ncf'; allowed: one that a"),
        ("demand.csv", "time_s,pool,gpus\n0,inference,\n", "demand.csv line 2: gpus: got ''"),
        ("demand.csv", "time_s,pool,gpus\n9,inference,1\n3,inference,1\n", "demand.csv line 3: time_s: got '3'"),
        ("demand.csv", "time_s,pool,gpus\n0,chat,1\n", "demand.csv line 2: pool: got 'chat'; allowed: inference"),
        ("demand.csv", "time_s,fn0,fn1\n0,1,\n", "demand.csv line 2: fn1: got ''"),
        ("demand.csv", "time_s,fn0,fn1\n0,1,2\n", "pool inference: demand: got 'inference'; allowed: a series: fn0"),
        (
            "cluster.yaml",
            FILES["cluster.yaml"].replace("name: inference", "name: training"),
            'cluster.yaml line 3: pools.1.name: got "training"; allowed: a name that no other pool has',
        ),
    ],
)
def test_a_wrong_trace_is_refused_before_anything_is_played(run: Run, name: str, text: str, message: str) -> None:
    Path(name).write_text(text)
    result = run(*SIMULATE, "--policy", "ebbtide,fifo", "--report", "report")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not Path("report").exists() or not list(Path("report").iterdir()), "a part of a report"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "w1"), "jobs.csv: workload: got 'w1'; allowed: none, the file is one workload"),
        (("--profiles", "none.csv"), "none.csv: cannot be read"),
        (("--profiles", "jobs.csv"), "jobs.csv line 1: columns: got 'job_id, submit_time_s"),
    ],
)
def test_a_wrong_option_is_refused(run: Run, words: tuple[str, ...], message: str) -> None:
    result = run(*SIMULATE, "--policy", "fifo", *words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in result.stderr


def test_a_measured_profile_gives_a_trace_without_run_times_its_lengths(run: Run) -> None:
    Path("jobs.csv").write_text(POLLUX + "w1,a,0,ncf,1,32768\nw2,a,5,ncf,1,32768\n")
    words = ("--policy", "fifo", "--profiles", "profile.csv")
    assert '"jobs": 2' in run(*SIMULATE, *words).stdout
    alone = run(*SIMULATE, *words, "--workload", "w2")
    assert (alone.exit_code, '"jobs": 1' in alone.stdout) == (0, True), alone.output
