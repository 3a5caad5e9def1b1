"""Invalid input: exit code 2, nothing on stdout, and one line that names the field, the value and what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]

GOOD = {
    "jobs.csv": "job_id,submit_time_s,duration_s,gpus\na,0,100,1\nb,10,50,2\n",
    "demand.csv": "time_s,pool,gpus\n0,inference,1\n300,inference,0\n",
    "cluster.yaml": "pools:\n"
    "  - {name: training, kind: training, nodes: 1, gpus_per_node: 4, gpu: a100-80g}\n"
    "  - {name: inference, kind: inference, nodes: 1, gpus_per_node: 4, gpu: a100-80g}\n",
    "job.yaml": "{name: train, gpus: {min: 1, max: 2}}\n",
    "profile.json": "{}",
}
SIMULATE = ("simulate", "--jobs", "jobs.csv", "--demand", "demand.csv", "--cluster", "cluster.yaml")
PLAN = ("plan", "--model", "gpt2", "--gpus", "2", "--global-batch", "8")
SUBMIT = ("submit", "-f", "job.yaml")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in GOOD.items():
        Path(name).write_text(text)
    return tmp_path


def refused(run: Run, words: tuple[str, ...], *messages: str) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith('{"error": ' if "json" in words else "Error: ")
    assert result.stderr.count("\n") == 1
    for message in messages:
        assert message in result.stderr


WORDS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("fly",), ("No such command 'fly'",)),
    (("ps", "--color"), ("No such option: --color",)),
    (("ps", "-o", "xml"), ("'-o'", "'xml' is not one of 'table', 'json', 'yaml'")),
    (("ps", "--url", "localhost"), ("--url: 'localhost' must start with http:// or https://",)),
    (("describe",), ("Missing argument 'JOB'",)),
    (("lending",), ("Missing command",)),
    (("scale", "a"), ("scale: nothing to change",)),
    (("scale", "a", "--max", "many"), ("'--max'", "'many'")),
    (("top", "-w", "-o", "json"), ("--watch",)),
    (("pools", "-o", "json", "list"), ("--output must follow the subcommand: ebbtide pools list",)),
    (("submit",), ("job: --name and --min must be given",)),
    (("submit", "--name", "x"), ("job: --min",)),
    (("submit", "--min", "1"), ("job: --name",)),
    (("submit", "--name", "x", "--min", "3", "--max", "2"), ("job: gpus.max", "3")),
    (("submit", "--name", "x", "--min", "0"), ("job: gpus.min", "0")),
    (("submit", "--name", "X y", "--min", "1"), ("job: name", '"X y"')),
    (("submit", "--name", "x", "--min", "1", "--model", "gpt2"), ("job: globalBatch",)),
    (("submit", "--name", "x", "--min", "1", "--steps", "-5"), ("job: steps", "-5")),
    (("submit", "--name", "x", "--min", "1", "--env", "A"), ("--env: 'A'",)),
    (("submit", "--name", "x", "--min", "1", "--label", "team"), ("--label: 'team'", "KEY=VALUE")),
    (("submit", "--name", "x", "--min", "1", "--label", "team=-"), ("job: labels.team", '"-"')),
    (("submit", "--name", "x", "--min", "1", "--speed", "t4"), ("--speed: 't4'", "GPU=NUMBER")),
    (("submit", "--name", "x", "--min", "1", "--speed", "t4=0"), ("job: speeds.t4: got 0", "greater than 0")),
    (("submit", "--name", "x", "--min", "1", "--env", "RANK=1"), ("job: env.RANK",)),
    (("submit", "--name", "x", "--min", "1", "--command", "echo 'a"), ("--command: No closing quotation",)),
    (("submit", "-f", "none.yaml"), ("none.yaml: cannot be read: No such file or directory",)),
    (("plan",), ("Missing option '--model'",)),
    (
        (*PLAN, "--model", "gpt9"),
        (
            "--model: 'gpt9'",
            "baichuan2-13b",
        ),
    ),
    ((*PLAN, "--model", "profile.json"), ("--model profile.json: ",)),
    (
        (*PLAN, "--gpu", "gtx"),
        (
            "--gpu: 'gtx'",
            "a100-40g, a100-40g-pcie",
        ),
    ),
    ((*PLAN, "--gpu", "profile.json"), ("--gpu profile.json: ",)),
    ((*PLAN, "--gpu", "cpu", "--shape", "pool.yaml"), ("--gpus: 2 cannot be combined with --shape",)),
    ((*PLAN[:3], "--global-batch", "8"), ("Missing option '--gpus'",)),
    ((*PLAN[:5],), ("Missing option '--global-batch'",)),
    ((*PLAN[:3], "--global-batch", "8", "--shape", "none.yaml"), ("none.yaml: cannot be read",)),
    ((*PLAN, "--tolerance", "1"), ("'--tolerance'", "1")),
    ((*PLAN, "--alternatives", "-1"), ("'--alternatives'", "-1")),
    ((*PLAN, "--plot", "curve.png"), ("--plot: curve.png",)),
    (
        (*PLAN, "--gpus", "1:4", "--plot", "curve.bmp"),
        (
            "--plot: curve.bmp",
            ".png",
        ),
    ),
    (
        (*PLAN, "--gpus", "1:4", "--dump", "all.json"),
        (
            "--gpus: a range",
            "--dump",
        ),
    ),
    ((*PLAN, "--dump", "no/where.json"), ("--dump no/where.json: cannot be written",)),
    ((*PLAN, "--load", "dump.json"), ("--model: gpt2 cannot be combined with --load",)),
    (("plan", "--load", "profile.json"), ("--load profile.json: ",)),
    (("plan", "--galvatron", "nowhere"), ("--galvatron: nowhere",)),
    (("plan", "--galvatron-plan", "plan.json"), ("--galvatron-plan: plan.json needs --galvatron",)),
    (
        (*PLAN, "--gpus", "0"),
        (
            "--gpus: 0",
            "1 to 65536",
        ),
    ),
    ((*PLAN, "--gpus", "two"), ("--gpus: 'two'",)),
    ((*PLAN, "--gpus", "4:2"), ("--gpus: 4:2 is empty",)),
    (
        (*PLAN, "--gpus", "9:15"),
        (
            "--gpus: ",
            "9:15",
        ),
    ),
    ((*PLAN, "--gpus", "1:"), ("--gpus: ''",)),
    (
        (*PLAN, "--gpus", "1:4", "--nodes", "2"),
        (
            "--nodes: 2",
            "1:4",
        ),
    ),
    (
        (*PLAN, "--gpus", "6", "--nodes", "4"),
        (
            "--nodes: 4",
            "6 GPUs",
        ),
    ),
    ((*PLAN, "--global-batch", "0"), ("'--global-batch'", "0")),
    ((*PLAN, "--seq", "-1"), ("'--seq'", "-1")),
    ((*PLAN, "--frozen-layers", "-1"), ("'--frozen-layers'", "-1")),
    ((*PLAN, "--frozen-layers", "99"), ("--frozen-layers: 99", "12 layers")),
    ((*PLAN, "--memory", "lots"), ("--memory: 'lots' is not a size above 0",)),
    ((*PLAN, "--memory", "0GB"), ("--memory: '0GB' is not a size above 0",)),
    (
        (*PLAN, "--memory", "90GB"),
        (
            "--memory: 90GB",
            "80.0 GB",
            "a100-80g",
        ),
    ),
    (("simulate",), ("--jobs: a file is required",)),
    (SIMULATE[:3], ("--cluster: a file is required",)),
    (
        (*SIMULATE, "--policy", "lifo"),
        (
            "--policy: policy set 'lifo' ",
            "fifo, sjf, srtf",
        ),
    ),
    (
        (*SIMULATE, "--policy", "fifo,fifo"),
        (
            "--policy: 'fifo'",
            "2 times",
        ),
    ),
    ((*SIMULATE, "--policy", ""), ("--policy: policy set ''",)),
    ((*SIMULATE, "--seed", "-1"), ("'--seed'", "-1")),
    ((*SIMULATE, "--limit", "0"), ("'--limit'", "0")),
    ((*SIMULATE, "--jobs", "none.csv"), ("none.csv", "cannot be read")),
]


@pytest.mark.parametrize(("words", "messages"), WORDS, ids=[" ".join(words) for words, _ in WORDS])
def test_invalid_command_line_is_rejected(
    run: Run, files: Path, words: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    refused(run, words, *messages)


HEAD = "job_id,submit_time_s,duration_s,gpus\n"
FILES: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [
    ("job.yaml", "name: [", SUBMIT, ("job.yaml line 1, column 8: is not YAML",)),
    ("job.yaml", "just words", SUBMIT, ("job.yaml: ", "'just words'")),
    ("job.yaml", "{name: x, gpus: {min: 2, max: 1}}", SUBMIT, ("job.yaml: gpus.max", "1", "2")),
    ("job.yaml", "{name: x, gpus: {min: 0, max: 1}}", SUBMIT, ("job.yaml: gpus.min", "0")),
    ("job.yaml", "{name: x, gpus: {min: 1, max: 1}, color: red}", SUBMIT, ("job.yaml: color",)),
    ("job.yaml", "{name: x, gpus: {min: 1, max: 1}, deadline: -5}", SUBMIT, ("job.yaml: deadline", "-5")),
    ("job.yaml", "{name: x, gpus: {min: 1, max: 1}, deadline: .nan}", SUBMIT, ("job.yaml: deadline", "nan")),
    ("job.yaml", "{name: x, gpus: 4}", SUBMIT, ("job.yaml: gpus", "4")),
    ("jobs.csv", "job_id,gpus\n", SIMULATE, ("jobs.csv", "submit_time_s")),
    ("jobs.csv", HEAD + "a,0,-5,1\n", SIMULATE, ("jobs.csv", "duration_s", "-5")),
    ("jobs.csv", HEAD + "a,0,nan,1\n", SIMULATE, ("jobs.csv", "duration_s", "nan")),
    ("jobs.csv", HEAD + "a,0,5,0\n", SIMULATE, ("jobs.csv", "gpus", "0")),
    ("jobs.csv", HEAD + "a,9,5,1\nb,3,5,1\n", SIMULATE, ("jobs.csv", "submit_time_s", "3")),
    ("jobs.csv", HEAD + "a,0,5,1\na,3,5,1\n", SIMULATE, ("jobs.csv", "job_id", "a")),
    ("demand.csv", "time_s,pool,gpus\n0,inference,-1\n", SIMULATE, ("demand.csv", "gpus", "-1")),
    ("demand.csv", "time_s,pool,gpus\n0,inference,1\n0,inference,2\n", SIMULATE, ("demand.csv", "time_s")),
    ("demand.csv", "time_s,pool,gpus\n0,mars,1\n", SIMULATE, ("mars",)),
    ("cluster.yaml", "pools: []", SIMULATE, ("cluster.yaml", "pools")),
    ("cluster.yaml", GOOD["cluster.yaml"].replace("a100-80g", "gtx"), SIMULATE, ("gtx", "a100-80g")),
    ("cluster.yaml", GOOD["cluster.yaml"].replace("nodes: 1", "nodes: 0"), SIMULATE, ("cluster.yaml", "nodes", "0")),
    ("profile.json", '{"name": ', (*PLAN, "--model", "profile.json"), ("--model profile.json: ",)),
]


@pytest.mark.parametrize(
    ("name", "text", "words", "messages"), FILES, ids=[f"{case[0]}: {case[1]!r}" for case in FILES]
)
def test_invalid_file_is_rejected_by_name(
    run: Run, files: Path, name: str, text: str, words: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    (files / name).write_text(text)
    refused(run, words, *messages)


def test_file_with_invalid_utf8_is_rejected(run: Run, files: Path) -> None:
    (files / "job.yaml").write_bytes(b"name: \xff")
    refused(run, SUBMIT, "job.yaml: is not UTF-8 text")


SETTINGS: list[tuple[Mapping[str, str], tuple[str, ...]]] = [
    ({"EBBTIDE_PORT": "http"}, ("EBBTIDE_PORT", "'http'")),
    ({"EBBTIDE_PORT": "99999"}, ("EBBTIDE_PORT", "'99999'")),
    ({"EBBTIDE_LOG_LEVEL": "loud"}, ("EBBTIDE_LOG_LEVEL", "'loud'")),
    ({"EBBTIDE_DATABASE_URL": "not a url"}, ("database", "not a url")),
]


@pytest.mark.parametrize(("settings", "messages"), SETTINGS, ids=[str(settings) for settings, _ in SETTINGS])
@pytest.mark.parametrize("verb", ["migrate", "serve"])
def test_invalid_setting_is_rejected_by_name(
    run: Run,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    settings: Mapping[str, str],
    messages: tuple[str, ...],
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    refused(run, (verb,), *messages)


def test_unknown_policy_is_rejected_before_serving(run: Run, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_POLICY", "lifo")
    refused(run, ("serve",), "EBBTIDE_POLICY: policy set 'lifo' ", "fifo, sjf, srtf")
