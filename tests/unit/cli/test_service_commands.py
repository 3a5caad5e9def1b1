"""Commands that talk to a service, against the real API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from cli.commands.jobs import FAILURE_WIDTH, format_last_failure
from scheduler.domain.commands import Command, ForecastMade, ReportProgress
from scheduler.domain.fleet import Forecast

Ask = Callable[..., Any]
Run = Callable[..., Result]


def submit_job(ask: Ask, name: str, *options: str) -> str:
    """Submit a job with 2 to 4 GPUs and return its ID."""
    job_id: str = ask("submit", "--name", name, "--min", "2", "--max", "4", "--command", "true", *options)["id"]
    return job_id


def test_pools_and_nodes_are_created_and_listed(ask: Ask, service: Any) -> None:
    ask("pools", "create", "training", "--kind", "training")
    ask("pools", "create", "serving", "--kind", "inference")
    ask("nodes", "add", "t0", "--pool", "training", "--gpu", "a100-80g", "--gpus", "4")
    for name in ("i0", "i1"):
        ask("nodes", "add", name, "--pool", "serving", "--gpu", "a100-80g", "--gpus", "1", "--memory", "80GB")
    service.tick()
    pools = {pool["name"]: pool for pool in ask("pools")}
    assert {name: (pool["kind"], pool["nodes"], pool["gpus"]) for name, pool in pools.items()} == {
        "serving": ("inference", 2, 2),
        "training": ("training", 1, 4),
    }
    assert pools == {pool["name"]: pool for pool in ask("pools", "list")}
    assert [node["name"] for node in ask("nodes")] == ["i0", "i1", "t0"]
    assert [node["name"] for node in ask("nodes", "--pool", "training")] == ["t0"]
    assert ask("nodes", "list")[0]["gpu_memory_bytes"] == 80_000_000_000


def test_pool_and_node_tables(run: Run, fleet: Any) -> None:
    pools, nodes = run("pools").stdout, run("nodes").stdout
    assert "serving" in pools
    assert "short at most 0.100%" in pools
    assert "4 x a100-80g" in nodes


def test_submitted_job_runs(ask: Ask, fleet: Any) -> None:
    job_id = submit_job(ask, "train", "--steps", "1000")
    fleet.tick()
    fleet.tick()
    [job] = ask("ps")
    assert (job["id"], job["state"], job["gpus"]["min"]) == (job_id, "running", 2)
    assert ask("describe", job_id)["nodes"]["t0"]
    [node] = ask("nodes", "--pool", "training")
    assert list(node["jobs"]) == [job_id]


def test_describe_shows_throughput_and_memory(ask: Ask, run: Run, fleet: Any) -> None:
    job_id = submit_job(ask, "train", "--steps", "1000")
    fleet.tick()
    fleet.tick()
    assert ask("describe", job_id)["memory"] == {"factor": 1.0, "deaths": [], "retry_at_s": None}
    assert "samples/s" not in run("describe", job_id).stdout
    report = ReportProgress(job_id, 1, 5.0, samples_per_s=31.5, peak_bytes=71_200_000_000)
    fleet.store.send(Command("report", 0.0, report))
    fleet.tick()
    shown = " ".join(run("describe", job_id).stdout.split())
    assert "throughput 31.5 samples/s" in shown
    assert "71.2 GB per GPU" in shown


def test_unreported_progress_is_marked_as_an_estimate(ask: Ask, run: Run, fleet: Any) -> None:
    job_id = submit_job(ask, "train", "--steps", "1000")
    submit_job(ask, "endless", "--min", "1", "--max", "1")
    fleet.tick()
    fleet.tick()
    fleet.tick(100.0)
    listed = run("ps").stdout
    assert listed.count("estimated") == 2, "progress and remaining time"
    assert "last failure" not in listed
    shown = " ".join(run("describe", job_id).stdout.split())
    assert "progress estimated" in shown
    assert "step time estimated" in shown
    assert "estimates" in run("explain", job_id).stdout
    fleet.store.send(Command("report", fleet.clock.now_s(), ReportProgress(job_id, 1, 5.0)))
    fleet.tick()
    assert "estimated" not in run("ps").stdout
    assert "estimate" not in run("explain", job_id).stdout
    assert "/1,000" in run("describe", job_id).stdout


def test_last_failure_is_listed_with_its_last_line() -> None:
    failure = {"code": "import-error", "reason": "rank 0 exited with code 1: a | ModuleNotFoundError: apex"}
    job = {"state": "failed", "failure": failure}
    assert format_last_failure(job) == "import-error: ModuleNotFoundError: apex"
    assert format_last_failure({**job, "state": "succeeded"}) == ""
    long = {**job, "failure": {"code": "", "reason": "x" * 100}}
    assert len(format_last_failure(long)) == FAILURE_WIDTH


def test_resize_mode_is_an_option(ask: Ask, fleet: Any) -> None:
    job = ask("describe", submit_job(ask, "train", "--on-resize", "restart"))
    assert (job["spec"]["onResize"], job["resize_mode"]) == ("restart", "restart")
    plain = ask("describe", submit_job(ask, "plain"))
    assert ("onResize" in plain["spec"], plain["resize_mode"]) == (False, "never")


def test_options_override_the_job_file(ask: Ask, fleet: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"name": "from-file", "gpus": {"min": 1, "max": 2}, "deadline": "2h", "steps": 5}))
    words = ("submit", "-f", str(path), "--max", "4", "--steps", "7", "--command", "python train.py --text 'a b'")
    spec = ask("describe", ask(*words, "--env", "A=1=2", "--speed", "t4=0.2", "--speed", "h200=3")["id"])["spec"]
    assert spec["speeds"] == {"t4": 0.2, "h200": 3.0}
    assert spec["gpus"] == {"min": 1, "max": 4}
    assert (spec["name"], spec["steps"], spec["deadline"]) == ("from-file", 7, 7200.0)
    assert spec["command"] == ["python", "train.py", "--text", "a b"]
    assert spec["env"] == {"A": "1=2"}


def test_lengths_are_read_from_a_file(ask: Ask, run: Run, fleet: Any, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("512\n64\n512\n")
    words = ("submit", "--name", "varied", "--min", "1", "--model", "gpt2", "--global-batch", "8", "--command", "true")
    spec = ask("describe", ask(*words, "--lengths", str(file))["id"])["spec"]
    assert spec["lengths"] == {"64": 1, "512": 2}
    file.write_text("512\nlong\n")
    failed = run(*words, "--lengths", str(file))
    assert failed.exit_code == 2
    assert "length 2" in failed.output


def test_job_is_read_from_stdin(run: Run, fleet: Any) -> None:
    result = run(
        "submit", "-f", "-", "-o", "json", stdin='{"name": "piped", "gpus": {"min": 1, "max": 1}, "command": ["true"]}'
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["name"] == "piped"


def test_quiet_prints_the_job_id_only(run: Run, fleet: Any) -> None:
    document = run("submit", "--name", "train", "--min", "1", "--quiet", "true").stdout
    assert run("describe", document.strip(), "-o", "json").exit_code == 0


def test_min_without_max_is_inelastic(ask: Ask, fleet: Any) -> None:
    assert ask("submit", "--name", "rigid", "--min", "3", "--command", "true")["gpus"]["max"] == 3


def test_dry_run_changes_nothing(ask: Ask, run: Run, fleet: Any) -> None:
    words = ("submit", "--name", "train", "--min", "2", "--dry-run")
    document = ask(*words)
    assert document["state"] in ("queued", "starting")
    assert document["reason"]["detail"] in " ".join(run(*words).stdout.split())
    assert ask("ps") == []


def test_scale_suspend_resume_and_cancel(ask: Ask, fleet: Any) -> None:
    job_id = submit_job(ask, "train")
    fleet.tick()
    assert ask("scale", job_id, "--max", "3")["gpus"]["max"] == 3
    assert ask("scale", job_id, "--min", "1")["gpus"]["min"] == 1
    assert ask("suspend", job_id)["intent"] == "suspend"
    fleet.tick()
    assert ask("describe", job_id)["state"] == "suspended"
    assert ask("resume", job_id)["intent"] == "run"
    assert ask("cancel", job_id)["intent"] == "cancel"
    fleet.tick()
    assert ask("describe", job_id)["state"] == "cancelled"
    assert ask("ps", "--state", "queued,running") == []


def test_change_prints_one_line(run: Run, ask: Ask, fleet: Any) -> None:
    job_id = submit_job(ask, "train")
    fleet.tick()
    assert run("suspend", job_id).stdout.split(maxsplit=1)[1].strip().endswith("to suspend, 4 of 2-4 GPUs")


def test_wait_fails_unless_the_job_succeeds(run: Run, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_passes(_: float) -> None:
        for decision in fleet.tick().decisions:
            fleet.client().cancel(decision.job_id)

    monkeypatch.setattr("cli.commands.submit.time.sleep", time_passes)
    result = run("submit", "--name", "doomed", "--min", "1", "--wait", "-o", "json", "true")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["state"] == "cancelled"
    assert "starting" in result.stderr
    assert json.loads(result.stderr.splitlines()[-1])["error"]["message"].startswith("job doomed-")


def test_history_shows_states_and_allocations(run: Run, ask: Ask, fleet: Any) -> None:
    job_id = submit_job(ask, "first", "--steps", "100000")
    fleet.tick()
    shown = run("history", job_id).stdout
    assert [line.split()[2] for line in shown.splitlines()[1:4]] == ["submitted", "queued", "starting"]
    assert shown.splitlines()[-1].split()[2:] == ["4", "0", "1", "dp4", "·", "1", "micro-batch"]
    document = ask("history", job_id)
    assert (document["job_id"], document["samples"]) == (job_id, [])


def test_explain_shows_numbers_of_a_pending_job(run: Run, ask: Ask, fleet: Any) -> None:
    first = submit_job(ask, "first", "--steps", "100000")
    fleet.tick()
    second = ask("submit", "--name", "second", "--min", "4", "--command", "true")["id"]
    fleet.tick()
    document = run("explain", second).stdout
    assert f"{second} is queued" in document
    assert "needs 4 GPUs to start and holds 0" in document
    assert first in document
    assert "Unblocked by" in document
    assert ask("explain", second)["needed_gpus"] == 4
    assert "running on" in run("explain", first).stdout or "starting on" in run("explain", first).stdout


def test_events_of_one_subject_or_all(ask: Ask, run: Run, fleet: Any) -> None:
    job_id = submit_job(ask, "train")
    fleet.tick()
    everything = ask("events")
    assert {event["subject"] for event in everything} >= {job_id, "t0", "training"}
    assert ask("events", "-n", "2") == everything[-2:]
    mine = ask("events", job_id)
    assert {event["subject"] for event in mine} == {job_id}
    assert "JobStarted" in run("events", job_id).stdout


def test_cordon_drain_and_uncordon(ask: Ask, run: Run, fleet: Any) -> None:
    assert ask("cordon", "t0")["cordoned"]
    assert "up, cordoned" in run("nodes").stdout
    assert ask("drain", "t0")["draining"]
    assert not ask("uncordon", "t0")["cordoned"]


def test_the_calendar_of_a_pool_is_changed_from_a_file(ask: Ask, run: Run, fleet: Any, tmp_path: Path) -> None:
    file = tmp_path / "lending.yaml"
    file.write_text("time_zone: Europe/Berlin\nblackouts:\n- {cron: '0 8 * * 1-5', duration_s: 10h}\n")
    assert ask("pools", "change", "serving", "--lending", str(file))["lending"]["time_zone"] == "Europe/Berlin"
    file.write_text("known_events:\n- {name: sale, start_s: 2026-11-27T08:00, duration_s: 3h, gpus: 2}\n")
    lending = ask("pools", "change", "serving", "--lending", str(file))["lending"]
    assert [event["start_s"] for event in lending["known_events"]] == [1_795_762_800.0]
    assert len(lending["blackouts"]) == 1
    file.write_text("time_zone: Europe/Berln\n")
    assert "'Europe/Berlin'" in run("pools", "change", "serving", "--lending", str(file)).stderr


def test_a_node_is_excluded_from_lending_and_included_again(ask: Ask, run: Run, fleet: Any) -> None:
    ask("nodes", "add", "s9", "--pool", "serving", "--gpu", "cpu", "--gpus", "2", "--no-lendable")
    assert "up, not lendable" in run("nodes").stdout
    assert ask("nodes", "change", "s9", "--lendable")["lendable"] is True
    assert ask("nodes", "change", "s9", "--no-lendable")["lendable"] is False
    assert run("nodes", "change", "s9").exit_code == 2


def test_a_part_of_a_node_is_made_lendable(ask: Ask, run: Run, fleet: Any) -> None:
    added = ask("nodes", "add", "s9", "--pool", "serving", "--gpu", "cpu", "--gpus", "4", "--lendable-gpus", "2-3")
    assert added["lendable_gpus"] == [2, 3]
    assert "up, 2 GPUs lendable" in run("nodes").stdout
    assert ask("nodes", "change", "s9", "--lendable-gpus", "0,2")["lendable_gpus"] == [0, 2]
    assert ask("nodes", "change", "s9", "--lendable-gpus", "all")["lendable_gpus"] == []
    for wrong in ("3-2", "a", "1,", "-1"):
        assert run("nodes", "change", "s9", "--lendable-gpus", wrong).exit_code == 2


def test_nodes_and_pools_are_deleted(ask: Ask, fleet: Any) -> None:
    ask("nodes", "delete", "t0")
    fleet.tick()
    ask("pools", "delete", "training")
    fleet.tick()
    assert [pool["name"] for pool in ask("pools")] == ["serving"]


def test_queues_are_created_changed_listed_and_deleted(ask: Ask, run: Run, fleet: Any) -> None:
    ask("queues", "create", "vision", "--guaranteed", "2", "--limit", "3")
    fleet.tick()
    job_id = submit_job(ask, "train", "--queue", "vision", "--min", "3", "--max", "3")
    fleet.tick()
    [queue] = ask("queues")
    assert (queue["name"], queue["own_gpus"], queue["borrowed_gpus"], queue["limit_gpus"]) == ("vision", 2, 1, 3)
    assert ask("queues", "set", "vision", "--limit", "none", "--weight", "2.5")["limit_gpus"] is None
    listed = run("queues", "list").stdout
    assert "guaranteed" in listed
    assert "2.5" in listed
    assert "guaranteed 1, weight 2.5" in run("queues", "set", "vision", "--guaranteed", "1").stdout
    ask("queues", "delete", "vision")
    assert [queue["declared"] for queue in ask("queues")] == [False]
    assert "not created" in run("queues").stdout
    assert job_id


def test_user_limits_are_changed(ask: Ask, run: Run, fleet: Any) -> None:
    made = ask("queues", "create", "vision", "--user-limit", "2", "--user-jobs", "7")
    assert (made["user_limit_gpus"], made["user_jobs_max"]) == (2, 7)
    assert "user limit 2" in run("queues", "set", "vision", "--weight", "2").stdout
    assert ask("queues", "set", "vision", "--user-limit", "none")["user_limit_gpus"] is None


def test_usage_as_table_and_csv(ask: Ask, run: Run, fleet: Any) -> None:
    assert "GPU-hours" not in run("usage").stdout
    ask("queues", "create", "vision")
    submit_job(ask, "train", "--queue", "vision")
    fleet.tick()
    fleet.clock.move_to(fleet.clock.now_s() + 1800.0)
    held = ask("usage", "--by", "queue,owner")["items"][0]["gpu_s"]
    assert held == ask("usage")["total"]["gpu_s"] > 3000.0
    document = run("usage", "--by", "day,queue,owner").stdout
    assert "GPU-hours" in document
    assert "vision" in document
    assert "0.0% on lent GPUs" in " ".join(document.split())
    assert run("usage", "--csv").stdout.splitlines() == [
        "queue,gpu_s,own_gpu_s,lent_gpu_s,lost_gpu_s",
        f"vision,{held:.3f},{held:.3f},0.000,0.000",
    ]
    saved = ask("savings", "--by", "queue")
    assert saved["total"]["gpu_s"] == held
    assert "vision" in run("savings", "--by", "queue").stdout
    assert run("savings", "--by", "model", "--csv").stdout.splitlines()[1].startswith(f",{held:.3f},")
    assert run("savings", "--by", "hour").exit_code != 0
    wrong = run("usage", "--by", "ownr")
    assert wrong.exit_code != 0
    assert "did you mean 'owner'?" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("set", "vision"), "nothing to change"),
        (("set", "vision", "--limit", "lots"), "--limit: 'lots'"),
        (("create", "vision", "--guaranteed", "4", "--limit", "2"), "limit_gpus: got 2"),
        (("create", "vision", "--weight", "0"), "weight: got 0.0"),
        (("create", "Vision"), "name: got"),
    ],
)
def test_invalid_queue_is_rejected(run: Run, fleet: Any, words: tuple[str, ...], said: str) -> None:
    result = run("queues", *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_lending_is_paused_resumed_and_recalled(ask: Ask, fleet: Any) -> None:
    assert ask("lending", "pause")["lending_paused"]
    assert not ask("lending", "resume")["lending_paused"]
    assert ask("lending", "recall-all")["lending_paused"]


def test_loans_are_listed_with_deadlines(ask: Ask, run: Run, fleet: Any) -> None:
    assert ask("loans") == []
    assert run("loans").stdout.strip() == "No node is lent."
    fleet.client().report_demand("serving", gpus=0)
    quiet = Forecast(fleet.clock.now_s(), 600.0, (0.5, 0.999), (0.0, 0.0), "said so")
    submit_job(ask, "hungry", "--max", "6", "--on-resize", "checkpoint")
    for _ in range(3):
        fleet.tick(400.0, learned=(Command(f"f{fleet.clock.now_s()}", 0.0, ForecastMade("serving", quiet)),))
        fleet.client().report_demand("serving", gpus=0)
    loans = ask("loans")
    assert {loan["pool"] for loan in loans} == {"serving"}
    assert "active" in run("loans", "--state", "active").stdout
    ask("lending", "recall-all")
    fleet.tick()
    assert run("loans", "--state", "recalled").stdout.count("2026-") == 2 * len(ask("loans", "--state", "recalled"))


def test_top_shows_pools_loans_and_live_jobs(ask: Ask, run: Run, fleet: Any) -> None:
    job_id = submit_job(ask, "train")
    fleet.tick()
    seen = ask("top")
    assert ([pool["name"] for pool in seen["pools"]], [job["id"] for job in seen["jobs"]]) == (
        ["serving", "training"],
        [job_id],
    )
    assert job_id in run("top").stdout


def test_watch_refreshes_until_interrupted(run: Run, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def interrupted_at_the_third(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("cli.commands.fleet.time.sleep", interrupted_at_the_third)
    result = run("top", "-w", "--every", "0.5")
    assert (result.exit_code, slept) == (0, [0.5, 0.5, 0.5])
    assert "serving" in result.stdout


def test_downloaded_snapshot_can_be_replayed(run: Run, ask: Ask, fleet: Any, tmp_path: Path) -> None:
    job_id = submit_job(ask, "train")
    fleet.tick()
    second = ask("submit", "--name", "second", "--min", "4", "--command", "true")["id"]
    fleet.tick()
    path = tmp_path / "snapshot.json"
    assert run("snapshot", "--to", str(path)).exit_code == 0
    assert json.loads(path.read_text()) == ask("snapshot")
    document = ask("replay", str(path))
    assert document["violations"] == []
    assert list(document["waiting"]) == [second]
    assert job_id in path.read_text()
    assert "No violations." in run("replay", str(path)).stdout


def test_forecast_names_the_known_event_that_raises_it(run: Run, fleet: Any) -> None:
    made = Forecast(0.0, 600.0, (0.5, 0.999), (2.0, 2.0), "demand profile", is_calibrated=False, event="launch")
    fleet.store.send(Command("forecast", 0.0, ForecastMade("serving", made)))
    fleet.tick()
    shown = run("forecast", "show", "serving").stdout
    assert ("known event launch" in shown, "demand profile" in shown) == (True, True)
