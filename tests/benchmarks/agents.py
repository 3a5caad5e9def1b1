"""Load of agents in pods on one API process: 1,000 agents of 125 jobs, SQLite store.

Each agent runs 8 ranks that make progress. In production, replies wait for orders, so an agent reports about every 20 s
while nothing changes. Here the agents first send as fast as the API answers, over 50 open connections. Then all of them
wait for orders at once, over a connection each.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from scheduler.domain.job import Job
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.run_document import MasterAddress
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.worker_token import issue_agent_token
from scheduler.executors.reported_runs import build_begun_run
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from scheduler.token_secret import load_token_secret
from tests.builders import a_job, a_node
from tests.loopback import find_free_port

JOBS, NODES_PER_JOB, RANKS = 125, 8, 8
CONNECTIONS = 50
SECONDS = 10.0
WANTED_PER_S = 500.0


def rows() -> Iterator[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        times_s, seconds, cpu_s, waiting_cpu_s = _measured(Path(folder))
    per_s = len(times_s) / seconds
    slow_s = statistics.quantiles(times_s, n=100)[98]
    what = f"{JOBS * NODES_PER_JOB:,} agents of {RANKS} ranks: reports answered a second"
    yield what, f"over {WANTED_PER_S:g}", f"{per_s:,.0f}"
    reply = f"{1e3 * statistics.median(times_s):.0f} and {1e3 * slow_s:.0f} ms"
    yield "the API's processor time for one report", "", f"{1e3 * cpu_s / len(times_s):.2f} ms"
    yield "the same, as fast as it goes: time to the reply, p50 and p99", "", reply
    yield "the API's processor time while all agents wait for orders", "", f"{waiting_cpu_s:.2f} s a second"


def _measured(folder: Path) -> tuple[list[float], float, float, float]:
    """Return the seconds of each exchange, the total seconds, the CPU seconds of the API for them, and those per second
    while all agents wait.
    """
    url = f"sqlite:///{folder / 'ebbtide.sqlite'}"
    migrate(url)
    _fill(url)
    secret = load_token_secret(folder / "token.secret")
    port = find_free_port()
    env = {
        **os.environ,
        "EBBTIDE_DATABASE_URL": url,
        "EBBTIDE_AUTH": "off",
        "EBBTIDE_RUN_DIR": str(folder),
        "EBBTIDE_PORT": str(port),
        "EBBTIDE_LOG_LEVEL": "WARNING",
    }
    api = subprocess.Popen([sys.executable, "-m", "cli", "api", "--force"], env=env, stdin=subprocess.PIPE)
    try:
        _wait_for(f"http://127.0.0.1:{port}/healthz")
        asyncio.run(_report_all(port, secret, until_s=time.monotonic()))  # each agent's first word is written
        started_s, used_s = time.monotonic(), _cpu_s(api.pid)
        times_s = asyncio.run(_report_all(port, secret, until_s=started_s + SECONDS))
        seconds, cpu_s = time.monotonic() - started_s, _cpu_s(api.pid) - used_s
        started_s, used_s = time.monotonic(), _cpu_s(api.pid)
        asyncio.run(_wait_for_orders(port, secret))
        waiting_cpu_s = (_cpu_s(api.pid) - used_s) / (time.monotonic() - started_s)
        return times_s, seconds, cpu_s, waiting_cpu_s
    finally:
        api.terminate()
        api.communicate()


def _fill(url: str) -> None:
    """Create running jobs that have started on their nodes."""
    store = SqlStore(url)
    lease = store.acquire_lease("bench", now_s=time.time(), ttl_s=1e6)
    assert lease is not None
    jobs = {name: _job(name, number) for number, name in enumerate(f"job-{at}" for at in range(JOBS))}
    nodes = {node: a_node(node, gpus=RANKS) for job in jobs.values() for node in job.allocation.target}
    store.commit(Commit(Snapshot(), Snapshot(generation=1, nodes=nodes, jobs=jobs), epoch=lease.epoch))
    for job in jobs.values():
        agents = {(job.id, node): "pod" for node in job.allocation.target}
        seats = tuple((node, gpu) for node, gpus in job.allocation.target.items() for gpu in gpus)
        run = build_begun_run(job, seats, agents, time.time(), master=MasterAddress("10.1.0.2", 29500), in_pods=True)
        store.run_log.begin_run(run, epoch=lease.epoch)
    store.close()


def _job(name: str, number: int) -> Job:
    target = {f"n{number * NODES_PER_JOB + at}": tuple(range(RANKS)) for at in range(NODES_PER_JOB)}
    plan = build_data_parallel_plan("a100-80g", NODES_PER_JOB * RANKS)
    return replace(a_job(name, 1, 64, state=JobState.RUNNING), allocation=Allocation(1, target, plan=plan))


async def _report_all(port: int, secret: bytes, *, until_s: float) -> list[float]:
    agents = [(number, f"job-{number // NODES_PER_JOB}") for number in range(JOBS * NODES_PER_JOB)]
    tokens = {job: issue_agent_token(secret, job) for _, job in agents}
    shares = [agents[at::CONNECTIONS] for at in range(CONNECTIONS)]
    found = await asyncio.gather(*(_report_one(port, share, tokens, until_s) for share in shares))
    return [seconds for times in found for seconds in times]


async def _report_one(port: int, agents: list[tuple[int, str]], tokens: dict[str, str], until_s: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times_s, step = list[float](), 0
    while not step or time.monotonic() < until_s:
        step += 1
        for number, job in agents:
            asked_s = time.monotonic()
            writer.write(_request(number, job, tokens[job], step))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            times_s.append(time.monotonic() - asked_s)
    writer.close()
    return times_s


async def _wait_for_orders(port: int, secret: bytes) -> None:
    """Have all agents wait for orders at once, for SECONDS."""

    async def wait(number: int, job: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request(number, job, issue_agent_token(secret, job), 1, wait_s=SECONDS))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        writer.close()

    await asyncio.gather(*(wait(at, f"job-{at // NODES_PER_JOB}") for at in range(JOBS * NODES_PER_JOB)))


def _request(number: int, job: str, token: str, step: int, *, wait_s: float = 0.0) -> bytes:
    status = {"phase": "running", "step": step, "loss": 2.5, "samples_per_s": 80.0, "peak_bytes": 10**10}
    ranks = [{"rank": rank, "exit_code": None, "status": status, "written_at_ns": step} for rank in range(RANKS)]
    run = {"job_id": job, "node": f"n{number}", "generation": 1, "ranks": ranks}
    body = json.dumps({"pod": "pod", "address": "10.1.0.2", "runs": [run], "wait_s": wait_s}).encode()
    head = (
        f"POST /v1/jobs/{job}/agents/n{number} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _wait_for(url: str) -> None:
    while True:
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
