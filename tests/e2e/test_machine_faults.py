"""Faults of every process and link between machines, API, controllers and database, while jobs run.

Ranks are watched by their processes alone. A seed determines the order, the moment and the length of the faults, and
the jobs that start or end meanwhile.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from scheduler.executors.agent_executor import CONTACT_MARGIN_S
from tests.e2e.fault_site import ADDRESSES, API, CONTROLLERS, FaultSite, open_fault_site
from tests.e2e.faulty_link import FaultyLink
from tests.postgres_server import PostgresServer

TAKEOVER_S_MAX = 15.0

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

Undo = Callable[[], None]
Inject = Callable[[FaultSite, Random], Undo]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and how long it lasts at least and at most, in seconds.

    Attributes:
        from_repair: whether the time to take over counts from the end of the fault.
        spares_ranks: whether no rank may be restarted.
    """

    inject: Inject
    shortest_s: float
    longest_s: float
    from_repair: bool = False
    spares_ranks: bool = True


@dataclass(slots=True)
class Figures:
    """What was measured in a sequence of faults."""

    takeovers_s: dict[str, float] = field(default_factory=dict)
    restarted: int = 0

    def __str__(self) -> str:
        worst = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.takeovers_s.items())
        return f"{len(self.takeovers_s)} faults, {self.restarted} ranks restarted, took over after: {worst}"


def stop_leader(site: FaultSite, _random: Random) -> Undo:
    return _stop(site, site.find_leader())


def kill_leader(site: FaultSite, _random: Random) -> Undo:
    return _kill(site, site.find_leader())


def cut_leader(site: FaultSite, _random: Random) -> Undo:
    return _cut([site.database_links[site.find_leader()]])


def stall_leader(site: FaultSite, _random: Random) -> Undo:
    return _stall([site.database_links[site.find_leader()]])


def kill_controllers(site: FaultSite, _random: Random) -> Undo:
    return _combine([_kill(site, name) for name in CONTROLLERS])


def stop_api(site: FaultSite, random: Random) -> Undo:
    return _stop(site, random.choice(API))


def kill_api(site: FaultSite, random: Random) -> Undo:
    return _kill(site, random.choice(API))


def kill_both_apis(site: FaultSite, _random: Random) -> Undo:
    return _combine([_kill(site, name) for name in API])


def cut_api_from_database(site: FaultSite, _random: Random) -> Undo:
    return _cut([site.database_links[name] for name in API])


def stop_database(site: FaultSite, _random: Random) -> Undo:
    site.server.send_signal(signal.SIGSTOP)
    return lambda: site.server.send_signal(signal.SIGCONT)


def kill_database(site: FaultSite, _random: Random) -> Undo:
    site.server.kill()
    return site.server.start


def cut_database(site: FaultSite, _random: Random) -> Undo:
    return _cut(list(site.database_links.values()))


def stop_agent(site: FaultSite, random: Random) -> Undo:
    return _stop(site, random.choice(list(ADDRESSES)))


def kill_agent(site: FaultSite, random: Random) -> Undo:
    return _kill(site, random.choice(list(ADDRESSES)))


def cut_machine(site: FaultSite, random: Random) -> Undo:
    return _cut([site.machine_links[random.choice(list(ADDRESSES))]])


def stall_machine(site: FaultSite, random: Random) -> Undo:
    return _stall([site.machine_links[random.choice(list(ADDRESSES))]])


def stop_supervisor(site: FaultSite, random: Random) -> Undo:
    ranks = sorted(site.monitor.ranks_of(random.choice(list(site.steady))), key=lambda rank: rank.pid)
    supervisor = site.find_supervisor(random.choice(ranks))
    supervisor.send_signal(signal.SIGSTOP)
    return lambda: supervisor.send_signal(signal.SIGCONT)


def kill_supervisor(site: FaultSite, random: Random) -> Undo:
    ranks = sorted(site.monitor.ranks_of(random.choice(list(site.steady))), key=lambda rank: rank.pid)
    site.find_supervisor(random.choice(ranks)).kill()
    return lambda: None


FAULTS = {
    "leader-stopped": Fault(stop_leader, 12.0, 20.0),
    "leader-killed": Fault(kill_leader, 1.0, 15.0),
    "leader-cut-off": Fault(cut_leader, 12.0, 20.0),
    "leader-stalled": Fault(stall_leader, 12.0, 20.0),
    "controllers-killed": Fault(kill_controllers, 1.0, 35.0, from_repair=True),
    "api-stopped": Fault(stop_api, 5.0, 35.0),
    "api-killed": Fault(kill_api, 1.0, 10.0),
    "both-apis-killed": Fault(kill_both_apis, 1.0, 40.0, from_repair=True),
    "apis-without-database": Fault(cut_api_from_database, 5.0, 40.0, from_repair=True),
    "database-stopped": Fault(stop_database, 5.0, 40.0, from_repair=True),
    "database-killed": Fault(kill_database, 1.0, 40.0, from_repair=True),
    "database-cut-off": Fault(cut_database, 1.0, 40.0, from_repair=True),
    "agent-stopped": Fault(stop_agent, 1.0, 40.0),
    "agent-killed": Fault(kill_agent, 1.0, 40.0),
    "machine-cut-off": Fault(cut_machine, 1.0, 40.0),
    "machine-stalled": Fault(stall_machine, 1.0, 40.0),
    "supervisor-stopped": Fault(stop_supervisor, 1.0, 10.0),
    "supervisor-killed": Fault(kill_supervisor, 1.0, 1.0, spares_ranks=False),
}
OUTLASTING = (
    "machine-cut-off",
    "machine-stalled",
    "agent-stopped",
    "agent-killed",
    "both-apis-killed",
    "database-stopped",
)
"""Faults that end leases if they last."""
LEASE_S, END_S_MAX = 10.0, 15.0
FEW = ("leader-killed", "agent-killed", "supervisor-killed")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("seed", "names", "lease_s"),
    [
        pytest.param(0, FEW, 2.0, id="few"),
        *(pytest.param(seed, tuple(FAULTS), 10.0, id=f"all-{seed}", marks=pytest.mark.full) for seed in (1, 2, 3)),
    ],
)
def test_faults_neither_use_a_gpu_twice_nor_restart_ranks(
    disposable_postgres: PostgresServer,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    seed: int,
    names: Sequence[str],
    lease_s: float,
) -> None:
    random, figures = Random(seed), Figures()
    with open_fault_site(tmp_path, disposable_postgres, disconnect_s=90.0, lease_s=lease_s) as site:
        for name in random.sample(names, len(names)):
            _run_fault(site, name, Random(f"{seed}-{name}"), figures, is_brief=names is FEW)
        monitor = site.monitor
        assert monitor.samples > 100
        assert max(figures.takeovers_s.values()) < TAKEOVER_S_MAX, figures
        watched = f"{monitor.samples} looks, {monitor.longest_gap_s * 1000:.0f} ms apart at most"
    record_property("faults", f"{figures}; {watched}")


@pytest.mark.full
@pytest.mark.parametrize("name", OUTLASTING)
def test_faults_that_outlast_the_lease_end_ranks_before_their_job_restarts(
    disposable_postgres: PostgresServer, tmp_path: Path, name: str
) -> None:
    with open_fault_site(tmp_path, disposable_postgres, disconnect_s=LEASE_S, lease_s=5.0) as site:
        before, monitor = site.wait_until_steady(), site.monitor
        since_s = time.monotonic()
        undo = FAULTS[name].inject(site, Random(name))
        try:
            while before <= monitor.live:
                assert time.monotonic() < since_s + LEASE_S + END_S_MAX, (name, before)
                time.sleep(0.1)
            assert time.monotonic() > since_s + LEASE_S / 2, (name, "its ranks have ended before their lease")
            time.sleep(max(0.0, since_s + LEASE_S + CONTACT_MARGIN_S + 5.0 - time.monotonic()))
        finally:
            undo()
        site.measure_takeover(time.monotonic(), f"probe-{name}")
        after = site.wait_until_steady()
        assert not monitor.conflicts, (name, monitor.conflicts)
        assert after != before
        assert any(len(monitor.generations_of(job_id)) > 1 for job_id in site.steady), name


def _run_fault(site: FaultSite, name: str, random: Random, figures: Figures, *, is_brief: bool) -> None:
    """Inject a fault while jobs start, and check everything once it has been repaired."""
    fault = FAULTS[name]
    before = site.wait_until_steady()
    starting = [site.submit(f"short-{name}", seconds=random.uniform(0.2, 3.0), gpus=1) for _ in range(2)]
    time.sleep(random.uniform(0.0, 1.5))
    since_s = time.monotonic()
    undo = fault.inject(site, random)
    length_s = fault.shortest_s if is_brief else random.uniform(fault.shortest_s, fault.longest_s)
    try:
        if not fault.from_repair:
            figures.takeovers_s[name], probe = site.measure_takeover(since_s, f"probe-{name}")
        time.sleep(max(0.0, since_s + length_s - time.monotonic()))
    finally:
        undo()
    if fault.from_repair:
        figures.takeovers_s[name], probe = site.measure_takeover(time.monotonic(), f"probe-{name}")
    site.wait(lambda: all(site.site.state(job_id) == "succeeded" for job_id in (*starting, probe)))
    after = site.wait_until_steady()
    monitor = site.monitor
    assert not monitor.conflicts, (name, monitor.conflicts)
    if fault.spares_ranks:
        figures.restarted += len(before - after)
        assert after == before, name
        for job_id in starting:  # the shortest end between two looks
            assert len([rank for rank in monitor.seen if rank.job_id == job_id]) <= 1, (name, job_id)


def _stop(site: FaultSite, name: str) -> Undo:
    site.signal(name, signal.SIGSTOP)
    return lambda: site.signal(name, signal.SIGCONT)


def _kill(site: FaultSite, name: str) -> Undo:
    site.site.stop(name)
    return lambda: site.start(name)


def _cut(links: Sequence[FaultyLink]) -> Undo:
    for link in links:
        link.cut()
    return _combine([link.repair for link in links])


def _stall(links: Sequence[FaultyLink]) -> Undo:
    for link in links:
        link.stall()
    return _combine([link.repair for link in links])


def _combine(undos: Sequence[Undo]) -> Undo:
    def undo_all() -> None:
        for undo in undos:
            undo()

    return undo_all
