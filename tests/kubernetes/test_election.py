"""Leader election with a real Lease and simulated clocks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from scheduler.kubernetes.api_objects import LEASE
from scheduler.kubernetes.client import KubernetesClient, connect
from scheduler.kubernetes.leader_election import ELECTION_LIMITS, LeaderElector, LeaseTimings
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.waiting import eventually

TERMS = LeaseTimings(lease_duration_s=10, renew_deadline_s=7.0, retry_period_s=1.5, margin_s=0.5)
Candidate = Callable[..., LeaderElector]


class ManualClock:
    """A simulated clock."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def candidate(cluster: KubernetesClient, namespace: str) -> Candidate:
    def make(identity: str, clock: ManualClock, *, born_s: float = 1.8e9) -> LeaderElector:
        return LeaderElector(
            cluster,
            name="operator",
            namespace=namespace,
            identity=identity,
            timings=TERMS,
            monotonic_s=clock,
            wall_s=lambda: born_s + clock.now_s,
        )

    return make


def test_one_candidate_leads(candidate: Candidate) -> None:
    a, b = candidate("a", ManualClock(0.0)), candidate("b", ManualClock(0.0))
    assert [a.try_acquire_or_renew(), b.try_acquire_or_renew(), a.try_acquire_or_renew()] == [True, False, True]
    assert b.holder == "a"


def test_silent_leader_stops_before_its_successor_starts(candidate: Candidate) -> None:
    clock = ManualClock(0.0)
    a, b = candidate("a", clock), candidate("b", clock)
    a.try_acquire_or_renew()
    b.try_acquire_or_renew()
    led: list[tuple[bool, bool]] = []
    while not b.is_leading:
        clock.now_s += 0.5
        b.try_acquire_or_renew()
        led.append((a.is_leading, b.is_leading))
    assert (True, True) not in led
    assert clock.now_s == pytest.approx(TERMS.lease_duration_s)
    assert not a.try_acquire_or_renew()
    assert a.holder == "b"


def test_renewing_leader_keeps_the_lease(candidate: Candidate) -> None:
    clock = ManualClock(0.0)
    a, b = candidate("a", clock), candidate("b", clock)
    for _ in range(20):
        clock.now_s += 1.5
        assert a.try_acquire_or_renew()
        assert not b.try_acquire_or_renew()


def test_clock_skew_is_harmless(candidate: Candidate) -> None:
    """Only the time without change counts, neither wall clocks nor the zero of monotonic clocks."""
    a_clock, b_clock = ManualClock(1e6), ManualClock(3.0)
    a, b = candidate("a", a_clock, born_s=1e9), candidate("b", b_clock, born_s=2e9)
    assert a.try_acquire_or_renew()
    for _ in range(20):
        a_clock.now_s += 1.5
        b_clock.now_s += 1.5
        assert a.try_acquire_or_renew()
        assert not b.try_acquire_or_renew()
    b_clock.now_s += TERMS.lease_duration_s
    assert b.try_acquire_or_renew()


def test_released_lease_is_acquired_at_once(candidate: Candidate, cluster: KubernetesClient, namespace: str) -> None:
    clock = ManualClock(0.0)
    a, b = candidate("a", clock), candidate("b", clock)
    a.try_acquire_or_renew()
    b.try_acquire_or_renew()
    a.release()
    assert not a.is_leading
    assert cluster.get(LEASE, "operator", namespace)["spec"]["holderIdentity"] == ""
    assert b.try_acquire_or_renew()
    assert cluster.get(LEASE, "operator", namespace)["spec"]["leaseTransitions"] == 1
    assert not a.try_acquire_or_renew()


def test_former_holder_does_not_release_the_lease(candidate: Candidate) -> None:
    clock = ManualClock(0.0)
    a, b = candidate("a", clock), candidate("b", clock)
    a.try_acquire_or_renew()
    b.try_acquire_or_renew()
    clock.now_s += TERMS.lease_duration_s
    assert b.try_acquire_or_renew()
    a.release()
    assert b.try_acquire_or_renew()


def test_concurrent_candidates_elect_one_leader(candidate: Candidate) -> None:
    candidates = [candidate(f"c{number}", ManualClock(0.0)) for number in range(6)]
    threads = [threading.Thread(target=each.try_acquire_or_renew) for each in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.is_leading for each in candidates) == 1


def test_deleted_lease_is_recreated(candidate: Candidate, cluster: KubernetesClient, namespace: str) -> None:
    a = candidate("a", ManualClock(0.0))
    a.try_acquire_or_renew()
    cluster.delete(LEASE, "operator", namespace)
    assert a.try_acquire_or_renew()
    assert cluster.get(LEASE, "operator", namespace)["spec"]["holderIdentity"] == "a"


def test_unreachable_server_ends_leadership_at_the_deadline(control_plane: ControlPlane, namespace: str) -> None:
    clock = ManualClock(0.0)
    own = connect(control_plane.admin_kubeconfig, limits=ELECTION_LIMITS)
    a = LeaderElector(own, name="operator", namespace=namespace, identity="a", timings=TERMS, monotonic_s=clock)
    assert a.try_acquire_or_renew()
    control_plane.pause_api()
    try:
        clock.now_s += 6.0
        assert a.try_acquire_or_renew()
        clock.now_s += 1.0
        assert not a.try_acquire_or_renew()
    finally:
        control_plane.resume_api()
    assert a.try_acquire_or_renew()
    own.close()


def test_run_acquires_and_releases(control_plane: ControlPlane, namespace: str) -> None:
    stops = [threading.Event(), threading.Event()]
    clusters = [connect(control_plane.admin_kubeconfig, limits=ELECTION_LIMITS) for _ in stops]
    candidates = [
        LeaderElector(
            each,
            name="operator",
            namespace=namespace,
            identity=f"c{number}",
            timings=LeaseTimings(600, 500.0, 0.3, 0.5),
        )
        for number, each in enumerate(clusters)
    ]
    threads = [threading.Thread(target=each.run, args=(stop,)) for each, stop in zip(candidates, stops, strict=True)]
    threads[0].start()
    eventually(lambda: candidates[0].is_leading, what="the first leads")
    threads[1].start()
    eventually(lambda: candidates[1].holder == "c0", what="the second has seen it")
    stops[0].set()
    threads[0].join()
    candidates[0].release()
    eventually(lambda: candidates[1].is_leading, what="the second leads, long before the lease is over")
    stops[1].set()
    threads[1].join()
    for each in clusters:
        each.close()


def test_step_down_leaves_the_lease_to_others(candidate: Candidate) -> None:
    clock = ManualClock(0.0)
    a, b = candidate("a", clock), candidate("b", clock)
    a.try_acquire_or_renew()
    a.step_down_for(10.0)
    assert not a.is_leading
    assert [a.try_acquire_or_renew(), b.try_acquire_or_renew()] == [False, True]
    b.step_down_for(10.0)
    clock.now_s = 9.9
    assert not a.try_acquire_or_renew()
    clock.now_s = 10.0
    assert a.try_acquire_or_renew()
    a.step_down_for(10.0)
    a.resume_candidacy()
    assert a.try_acquire_or_renew()


def test_empty_lease_is_acquired(candidate: Candidate, cluster: KubernetesClient, namespace: str) -> None:
    cluster.create(LEASE, {"metadata": {"name": "operator", "namespace": namespace}})
    a = candidate("a", ManualClock(0.0))
    assert a.try_acquire_or_renew()
    assert a.try_acquire_or_renew()
