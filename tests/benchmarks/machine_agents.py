"""Node agents: starts and what containment adds to them, an agent at rest, and many agents at rest on one API."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import psutil

from api.identity.machine_credentials import generate_credential
from scheduler.agent.containment import Containment, ContainmentLevel, LevelName
from scheduler.agent.control_groups import ControlGroups
from scheduler.domain.machine import JoinToken, Machine
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.sql_store import SqlStore
from tests.agent.runs import TestMachine, python_job
from tests.e2e.machine_site import MachineSite, open_site

SUBMISSIONS = 11
PAIRS = 20
AT_REST_S = 20.0
AGENTS = (200, 2000)
WAIT_S = 20.0
ADDRESSES = 20


def rows() -> Iterator[tuple[str, str, str]]:
    with TemporaryDirectory() as folder:
        level, added_s = _measure_containment(Path(folder))
        yield f"time that containment adds to a start, level {level}: median", "50 ms", f"{1000 * added_s:.0f} ms"
    with TemporaryDirectory() as folder, open_site(Path(folder), disconnect_s=120.0) as site:
        site.join("m1", gpus=2)
        yield "submission to the first line of a script, warm agent: median, longest", "1.5 s", _measure_starts(site)
        yield "memory of an agent at rest", "under 80 MiB", f"{_memory_bytes(site, 'm1') / 2**20:.0f} MiB"
        api = psutil.Process(site.processes["api"].pid)
        for agents in AGENTS:
            share = asyncio.run(_measure_rest(site, api, agents))
            target = "under 5% of a core" if agents == AGENTS[0] else "under one core"
            yield f"{agents:,} agents at rest on one API process", target, f"{share:.1%} of a core"


def _measure_containment(folder: Path) -> tuple[str, float]:
    """Return the level, and the median of the time that it adds between the order to prepare and the first line."""
    folder.chmod(0o711)  # ranks without a container have a user of their own, too
    machine = TestMachine(folder)
    contained = machine.containment
    plain = replace(contained, bwrap="", groups=ControlGroups(), level=ContainmentLevel(LevelName.NONE))
    added_s = []
    for pair in range(PAIRS):
        took_s = [_measure_start(machine, each, f"{pair}-{each.level.name}") for each in (plain, contained)]
        added_s.append(took_s[1] - took_s[0])
    machine.close()
    return contained.level.name, median(added_s)


def _measure_start(machine: TestMachine, containment: Containment, job_id: str) -> float:
    machine.containment = containment
    first_line = machine.working_dir(job_id) / "first-line"
    ordered_s = time.time()
    machine.finish(python_job("", job_id=job_id, command=("sh", "-c", f"date +%s.%N > {first_line}")))
    return float(first_line.read_text()) - ordered_s


def _measure_starts(site: MachineSite) -> str:
    took_s = []
    for number in range(SUBMISSIONS):
        first_line = site.shared / f"first-line-{number}"
        submitted_s = time.time()
        job_id = site.submit(f"start{number}", ["sh", "-c", f"date +%s.%N > {first_line}"], gpus=1)
        site.wait_for_success(job_id)
        took_s.append(float(first_line.read_text()) - submitted_s)
    return f"{median(took_s):.2f} s, {max(took_s):.2f} s"


def _memory_bytes(site: MachineSite, name: str) -> int:
    return int(psutil.Process(site.processes[name].pid).memory_info().rss)


async def _measure_rest(site: MachineSite, api: psutil.Process, agents: int) -> float:
    """Return the processor time of the API divided by the time, while this many machines wait for something to do.

    Raises:
        RuntimeError: not every machine got its replies, so the figure would be too good.
    """
    names, replies = list(_register(site, agents).items()), Counter[str]()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_open_client(site, number)) for number in range(agents)]
        until_s = time.monotonic() + 3 * AT_REST_S
        polls = [
            asyncio.create_task(_poll(client, name, key, until_s, replies))
            for client, (name, key) in zip(clients, names, strict=True)
        ]
        await asyncio.sleep(AT_REST_S)
        replies.clear()
        before_s, started_s = sum(api.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(until_s - time.monotonic())
        share = float(sum(api.cpu_times()[:2]) - before_s) / (time.monotonic() - started_s)
        answered = [name for name, _ in names if replies[name]]
        await asyncio.gather(*polls)
    if len(answered) < agents or replies.total() > 3 * agents:
        period = f"{2 * AT_REST_S:.0f} s"
        raise RuntimeError(f"{len(answered)} of {agents} machines got {replies.total()} replies in {period}")
    return share


def _open_client(site: MachineSite, number: int) -> httpx.AsyncClient:
    """Return the client of one agent: in a shared one, the search for a connection takes longer than the request.

    The API limits the connections of one address, so that the agents have several loopback addresses.
    """
    transport = httpx.AsyncHTTPTransport(verify=False, local_address=f"127.0.1.{number % ADDRESSES + 1}")
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{site.port}", transport=transport, timeout=120.0)


def _register(site: MachineSite, agents: int) -> dict[str, str]:
    """Store machines directly, because joining is limited by address. Return their credentials by name."""
    store, now_s = SqlStore(site.database_url), time.time()
    token = JoinToken(f"bench-{agents}", f"bench-{agents}", "training", agents, now_s, "bench", now_s + 3600.0)
    audit = AuditEntry(now_s, "bench", "", "JoinMachine", "bench", None, None, "")
    store.machines.add_token(token, audit)
    credentials = {}
    for number in range(agents):
        name = f"rest{agents}-{number}"
        digest, credentials[name] = generate_credential()
        machine = Machine(name, (name,), "training", "cpu", "127.0.0.1", "0.1.0", now_s, digest=digest)
        store.machines.join(machine, token.id, audit, now_s=now_s)
    store.close()
    return credentials


async def _poll(client: httpx.AsyncClient, name: str, credential: str, until_s: float, replies: Counter[str]) -> None:
    headers = {"Authorization": f"Bearer {credential}"}
    while (left_s := until_s - time.monotonic()) > 0:
        document = {"runs": [], "wait_s": min(WAIT_S, left_s)}
        reply = await client.post(f"/v1/machines/{name}/report", json=document, headers=headers)
        reply.raise_for_status()
        replies[name] += 1
