"""Jobs on machines with node agents: real API, controller, agents, supervisors and ranks."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from tests.agent.requirements import needs_root
from tests.agent.runs import find_processes
from tests.e2e.machine_site import MachineSite, open_site

RANK = Path(__file__).with_name("reporting_rank.py")

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[MachineSite]:
    with open_site(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineSite]:
    """Two machines of two GPUs, for tests that leave them as they were."""
    with open_site(tmp_path_factory.mktemp("site")) as opened:
        opened.join("m1", gpus=2)
        opened.join("m2", gpus=2, address="127.0.0.2")
        yield opened


def submit(site: MachineSite, name: str, *, gpus: int, seconds: float, **fields: Any) -> str:
    script = site.shared / RANK.name
    shutil.copy(RANK, script)
    script.chmod(0o644)
    return site.submit(name, ["python3", str(script), str(site.shared), str(seconds)], gpus=gpus, **fields)


def read_ranks(site: MachineSite, job_id: str, generation: int = 1) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in site.shared.glob(f"{job_id}-{generation}-*.json")]
    return {int(seen["RANK"]): seen for seen in found}


def find_generations(site: MachineSite, job_id: str) -> set[int]:
    return {int(path.name.split("-")[-2]) for path in site.shared.glob(f"{job_id}-*.json")}


def find_last_sign_of_life(site: MachineSite, job_id: str, generation: int = 1) -> float:
    return max(float(path.read_text()) for path in site.shared.glob(f"{job_id}-{generation}-*.alive"))


def wait_until_gone(site: MachineSite, jobs: Sequence[str]) -> None:
    """Wait until cancelled jobs hold no GPU and have no container."""

    def is_released(job_id: str) -> bool:
        job = site.client.job(job_id)
        return job["state"] == "cancelled" and not job["releasing_nodes"]

    site.wait(lambda: all(map(is_released, jobs)) and not any(map(find_containers, jobs)))


def find_containers(job_id: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"/jobs/{job_id}/".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def list_lines(site: MachineSite, job_id: str, rank: int) -> list[str]:
    return [line["text"] for line in site.client.logs(job_id, rank=rank)]


def test_job_runs_across_two_machines_to_its_end(shared_site: MachineSite) -> None:
    site = shared_site
    job_id = submit(site, "both", gpus=4, seconds=1.0)
    site.wait_for_success(job_id)
    ranks = read_ranks(site, job_id)
    assert sorted(ranks) == [0, 1, 2, 3]
    assert {seen["WORLD_SIZE"] for seen in ranks.values()} == {"4"}
    assert {seen["LOCAL_WORLD_SIZE"] for seen in ranks.values()} == {"2"}
    assert [(ranks[rank]["NODE_RANK"], ranks[rank]["LOCAL_RANK"]) for rank in range(4)] == [
        ("0", "0"), ("0", "1"), ("1", "0"), ("1", "1"),
    ]  # fmt: skip
    assert len({(seen["MASTER_ADDR"], seen["MASTER_PORT"]) for seen in ranks.values()}) == 1
    assert all(seen["uid"] != 0 for seen in ranks.values())
    site.wait(
        lambda: [list_lines(site, job_id, rank) for rank in range(4)] == [[f"rank {rank} of 4"] for rank in range(4)]
    )


@pytest.fixture
def patient_site(tmp_path: Path) -> Iterator[MachineSite]:
    """A site whose ranks go on for longer than the start of three processes takes."""
    with open_site(tmp_path, disconnect_s=60.0) as opened:
        yield opened


@pytest.mark.full
def test_ranks_outlive_restarts_of_agent_api_and_controller(patient_site: MachineSite) -> None:
    site = patient_site
    site.join("m1", gpus=1)
    job_id = submit(site, "steady", gpus=1, seconds=6.0)
    site.wait(lambda: len(read_ranks(site, job_id)) == 1)
    for name, arguments in (("m1", site.agent_arguments("m1")), ("api", ("api",)), ("controller", ("controller",))):
        site.stop(name)
        site.start(name, *arguments)
    site.wait(site.client.is_ready)
    site.wait_for_success(job_id)
    assert find_generations(site, job_id) == {1}


def test_cancelled_job_leaves_no_process_and_frees_its_gpus(shared_site: MachineSite) -> None:
    site = shared_site
    marker = site.shared / "survivor"
    script = f"setsid env -i sh -c 'while true; do touch {marker}; sleep 0.05; done' & sleep 600"
    job_id = site.submit("detached", ["sh", "-c", script], gpus=1)
    site.wait(marker.exists)
    site.client.cancel(job_id)
    site.wait(lambda: site.state(job_id) == "cancelled")
    site.wait(lambda: time.time() - marker.stat().st_mtime > 1.0)
    site.wait(lambda: not site.client.job(job_id)["releasing_nodes"])


@pytest.mark.parametrize(
    ("seed", "cancels"), [(0, 4), *(pytest.param(seed, 200, marks=pytest.mark.full) for seed in (1, 2, 3, 4, 5))]
)
def test_jobs_that_are_cancelled_at_any_moment_leave_no_process(
    shared_site: MachineSite, seed: int, cancels: int
) -> None:
    """A thousand cancels in all. Of each four jobs, one runs. The others are prepared, start or run."""
    site, random, began = shared_site, Random(seed), 0
    for batch in range(cancels // 4):
        jobs = {site.shared / f"{seed}-{batch}-{number}": "" for number in range(4)}
        for ready in jobs:
            command = f"setsid env -i sleep 4328.5 & touch {ready}; exec sleep 4328.5"
            jobs[ready] = site.submit(ready.name, ["sh", "-c", command], gpus=1)
        first, *others = random.sample(list(jobs), 4)
        for ready in others:
            time.sleep(random.uniform(0.0, 0.3))
            site.client.cancel(jobs[ready])
        site.wait(first.exists)
        site.client.cancel(jobs[first])
        wait_until_gone(site, list(jobs.values()))
        assert find_processes("4328.5") == []
        began += sum(ready.exists() for ready in jobs)
    assert cancels == 4 or cancels // 4 < began < cancels


def read_limits(site: MachineSite, job_id: str) -> dict[str, str]:
    """Return what the control groups of a job's first run say, under the names of version 1 or 2 of the kernel."""
    (record,) = site.folder.glob(f"m*/jobs/{job_id}/gen-1@*/supervisor.json")
    folders = [Path(path) for path in json.loads(record.read_text())["control_groups"].values()]
    files = [path for folder in folders for path in folder.iterdir() if path.name in _LIMIT_FILES]
    return {_LIMIT_FILES[path.name]: path.read_text().split()[0] for path in files}


_LIMIT_FILES = {
    "memory.limit_in_bytes": "memory",
    "cpu.shares": "weight",
    "cpu.cfs_quota_us": "quota",
    "memory.max": "memory",
    "cpu.weight": "weight",
    "cpu.max": "quota",
}


@needs_root
def test_jobs_have_limits_of_memory_and_cores(shared_site: MachineSite) -> None:
    """A job that states none leaves memory to the system, and never waits for idle cores."""
    site = shared_site
    plain = site.submit("plain", ["sleep", "60"], gpus=2)
    stated = site.submit("stated", ["sleep", "60"], gpus=1, resources={"memory": "1Gi", "cpu": "1500m"})
    site.wait(lambda: all(list(site.folder.glob(f"m*/jobs/{job}/gen-1@*/started.json")) for job in (plain, stated)))
    default, own = read_limits(site, plain), read_limits(site, stated)
    total = psutil.virtual_memory().total
    assert total / 2 < int(default["memory"]) < total - 2**29
    assert (default["weight"] in ("2048", "200"), default["quota"] in ("-1", "max")) == (True, True)
    assert (own["memory"], own["weight"] in ("1024", "100"), own["quota"]) == (str(1 << 30), True, "150000")
    for job_id in (plain, stated):
        site.client.cancel(job_id)


@needs_root
def test_job_beyond_its_memory_is_told_its_limit(shared_site: MachineSite) -> None:
    site = shared_site
    script = "data = bytearray(1 << 30); print(len(data))"
    job_id = site.submit("greedy", ["python3", "-c", script], gpus=1, resources={"memory": "128Mi"})
    site.wait(lambda: "128 MiB" in site.client.job(job_id)["message"])
    assert "resources.memory" in site.client.job(job_id)["message"]
    assert site.state(job_id) == "planning"
    assert len(site.client.job(job_id)["memory"]["deaths"]) == 1
    site.client.cancel(job_id)


@pytest.mark.full
def test_agent_that_stops_can_let_its_ranks_save_and_leave(site: MachineSite) -> None:
    site.join("m1", "--leave-within", "20s", gpus=1)
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(600)"
    job_id = site.submit("leaving", ["python3", "-c", script], gpus=1)
    site.wait(lambda: site.state(job_id) == "running")
    site.stop("m1", signal.SIGTERM)
    (record,) = site.folder.glob(f"m1/jobs/{job_id}/gen-1@m1/exit-0.json")
    assert json.loads(record.read_text())["code"] == 0


@pytest.mark.full
def test_resized_job_never_runs_twice(site: MachineSite) -> None:
    site.join("m1", gpus=2)
    site.join("m2", gpus=2, address="127.0.0.2")
    job_id = submit(site, "elastic", gpus=1, gpus_max=2, seconds=60.0, onResize="restart")
    site.wait(lambda: len(read_ranks(site, job_id)) == 2)
    site.client.scale(job_id, min_gpus=4, max_gpus=4)
    site.wait(lambda: len(find_generations(site, job_id)) == 2)
    later = read_ranks(site, job_id, max(find_generations(site, job_id)))
    assert min(seen["started_s"] for seen in later.values()) > find_last_sign_of_life(site, job_id)


@pytest.mark.full
def test_jobs_started_together_have_stores_of_their_own(site: MachineSite) -> None:
    site.join("m1", gpus=4)
    site.join("m2", gpus=4, address="127.0.0.2")
    jobs = [submit(site, f"pair{number}", gpus=2, seconds=1.0) for number in range(4)]
    site.wait(lambda: all(site.state(job_id) == "succeeded" for job_id in jobs))
    ports = {
        (seen["MASTER_PORT"], seen["TORCHELASTIC_RUN_ID"])
        for job_id in jobs
        for seen in read_ranks(site, job_id).values()
    }
    assert len(ports) == len({port for port, _ in ports}) == len(jobs)


@pytest.mark.full
def test_machine_without_contact_ends_its_ranks_before_the_job_restarts(site: MachineSite) -> None:
    site.join("m1", gpus=1)
    job_id = submit(site, "cut-off", gpus=1, seconds=120.0)
    site.wait(lambda: len(read_ranks(site, job_id)) == 1)
    site.join("m2", gpus=1, address="127.0.0.2")
    site.processes["m1"].send_signal(signal.SIGSTOP)
    site.wait(lambda: len(find_generations(site, job_id)) == 2)
    (later,) = read_ranks(site, job_id, max(find_generations(site, job_id))).values()
    assert later["started_s"] > find_last_sign_of_life(site, job_id)
    assert later["EBBTIDE_NODE"] == "m2"


def test_uploaded_directory_is_set_up_and_runs_the_users_own_modules(shared_site: MachineSite, tmp_path: Path) -> None:
    site = shared_site
    project = tmp_path / "project"
    (project / "scheduler").mkdir(parents=True)
    (project / "scheduler" / "__init__.py").write_text("NAME = 'mine'\n")
    (project / "train.py").write_text(
        "import scheduler, sys\n"
        "print(scheduler.NAME, open('built').read().strip(), sorted({'api', 'cli', 'baselines'} & set(sys.modules)))\n"
    )
    job_id = site.run_command(
        *("submit", "--name", "own", "--workdir", str(project), "--setup", "echo once > built", "--min", "1", "-q"),
        *("--", "python3", "train.py"),
    )
    site.wait_for_success(job_id)
    site.wait(lambda: list_lines(site, job_id, 0) == ["mine once []"])


def test_cancel_ends_a_setup_command(shared_site: MachineSite, tmp_path: Path) -> None:
    site = shared_site
    (tmp_path / "project").mkdir()
    options = ("--workdir", str(tmp_path / "project"), "--setup", "sleep 4326.5", "--min", "1", "-q", "--", "true")
    job_id = site.run_command("submit", "--name", "preparing", *options)
    site.wait(lambda: bool(find_processes("4326.5")))
    site.wait(lambda: "setup command" in site.client.explanation(job_id)["summary"])
    assert site.state(job_id) == "starting"
    site.client.cancel(job_id)
    site.wait(lambda: not find_processes("4326.5"))
    site.wait_for_success(site.submit("next", ["true"], gpus=4))


def test_failed_setup_fails_the_job_and_says_why(shared_site: MachineSite, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    job_id = shared_site.run_command(
        *("submit", "--name", "broken", "--workdir", str(tmp_path / "project"), "--min", "1", "-q"),
        *("--setup", "echo no compiler; exit 3", "--", "python3", "train.py"),
    )
    shared_site.wait(lambda: shared_site.state(job_id) == "failed")
    assert "no compiler" in str(shared_site.client.job(job_id))


def test_command_that_does_not_exist_is_tried_once(shared_site: MachineSite) -> None:
    job_id = shared_site.run_command("submit", "--name", "typo", "--min", "1", "-q", "--", "no-such-program")
    shared_site.wait(lambda: shared_site.state(job_id) == "failed")
    job = shared_site.client.job(job_id)
    assert job["failure"] is not None
    assert (job["failure"]["code"], job["account"]["failures"]) == ("command-not-found", 1)
