"""Agent pods to create, delete and bind."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.host_ports import compute_port_requests
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.node_view import NodeView
from scheduler.kubernetes.pod_changes import (
    MIN_GRACE_PERIOD_S,
    FreeGpus,
    count_held_gpus,
    find_orphans,
    find_stranded_pods,
    plan_pod_changes,
    select_gang_to_bind,
)
from scheduler.kubernetes.pod_view import PodView
from tests.builders import a_job

NOW_S = 100.0


def on(
    target: Gpus, *, generation: int = 1, leave_by_s: float | None = None, state: JobState = JobState.RUNNING
) -> Job:
    job = a_job("a", 1, 16, state=state, on=target)
    return replace(job, allocation=replace(job.allocation, generation=generation, leave_by_s=leave_by_s))


def pod(
    node: str, gpus: int, *, generation: int = 1, bound: bool = True, phase: str = "Running", **more: object
) -> PodView:
    facts = PodView(
        "jobs", f"a-g{generation}-{node}", f"uid-{node}-{generation}", node if bound else "", gpus, phase, False
    )
    return replace(facts, job_id="a", target_node=node, generation=generation, **more)  # type: ignore[arg-type]  # fields of PodFacts


def nodes(**gpus: int) -> dict[str, NodeView]:
    return {name: NodeView(name, "1", True, False, count) for name, count in gpus.items()}


def test_new_job_gets_one_pod_per_node() -> None:
    changes = plan_pod_changes(on({"t1": (0, 1), "t0": (4,)}), [], NOW_S)
    assert [(new.name, new.node, new.gpus) for new in changes.create] == [("a-g1-0", "t0", 1), ("a-g1-1", "t1", 2)]
    assert changes.delete == ()
    assert not changes.is_gang_complete


def test_resize_replaces_only_pods_of_changed_nodes() -> None:
    before = [pod("t0", 2), pod("t1", 2), pod("t2", 2)]
    job = on({"t0": (0, 1), "t1": (0, 1, 2), "t3": (0,)}, generation=2, leave_by_s=NOW_S + 40)
    changes = plan_pod_changes(job, before, NOW_S)
    assert [(new.node, new.gpus) for new in changes.create] == [("t1", 3), ("t3", 1)]
    assert [(old.pod.target_node, old.grace_period_s) for old in changes.delete] == [("t1", 40.0), ("t2", 40.0)]
    assert changes.gang == {"t0": before[0]}


def test_other_gpus_on_the_same_node_keep_the_pod() -> None:
    changes = plan_pod_changes(on({"t0": (4, 5)}, generation=2), [pod("t0", 2)], NOW_S)
    assert (changes.create, changes.delete) == ((), ())


def test_grace_period_ends_at_the_deadline() -> None:
    job = replace(on({}, generation=2, leave_by_s=NOW_S - 5), state=JobState.PREEMPTED)
    (old,) = plan_pod_changes(job, [pod("t0", 2)], NOW_S).delete
    assert old.grace_period_s == MIN_GRACE_PERIOD_S


def test_terminating_pod_is_not_deleted_again() -> None:
    leaving = pod("t0", 2, is_deleting=True)
    changes = plan_pod_changes(on({}, state=JobState.PREEMPTED), [leaving], NOW_S)
    assert (changes.create, changes.delete, changes.gang) == ((), (), None)


def test_ended_pod_stays_until_the_next_generation() -> None:
    ended = pod("t0", 2, phase="Failed")
    assert plan_pod_changes(on({"t0": (0, 1)}), [ended], NOW_S).delete == ()
    later = plan_pod_changes(on({"t0": (0, 1)}, generation=2), [ended], NOW_S)
    assert [old.pod for old in later.delete] == [ended]
    assert [new.name for new in later.create] == ["a-g2-0"]


def test_bound_pod_is_preferred() -> None:
    twin = pod("t0", 2, generation=0, bound=False)
    changes = plan_pod_changes(on({"t0": (0, 1)}), [twin, pod("t0", 2)], NOW_S)
    assert [old.pod for old in changes.delete] == [twin]


def test_pod_of_unknown_job_is_an_orphan() -> None:
    assert [old.pod.job_id for old in find_orphans([pod("t0", 1)], {})] == ["a"]
    assert find_orphans([pod("t0", 1)], {"a": on({})}) == ()


def test_pod_on_a_removed_node_is_deleted_without_grace_period() -> None:
    gone, unbound = pod("t0", 2), pod("t1", 2, bound=False)
    foreign = replace(gone, job_id="")
    assert [(old.pod, old.grace_period_s) for old in find_stranded_pods([gone, unbound, foreign], {"t9": ()})] == [
        (gone, 0.0)
    ]
    assert find_stranded_pods([gone], {"t0": ()}) == ()


def test_foreign_pods_are_never_orphans() -> None:
    assert find_orphans([replace(pod("t0", 1), job_id="")], {}) == ()


def test_gang_is_bound_as_a_whole() -> None:
    pods = [pod("t0", 2, bound=False), pod("t1", 2, bound=False)]
    changes = plan_pod_changes(on({"t0": (0, 1), "t1": (0, 1)}), pods, NOW_S)
    assert select_gang_to_bind("a", changes, FreeGpus(nodes(t0=2, t1=1), {})) is None
    assert select_gang_to_bind("a", changes, FreeGpus(nodes(t0=2), {})) is None
    room = FreeGpus(nodes(t0=2, t1=2), {})
    gang = select_gang_to_bind("a", changes, room)
    assert gang is not None
    assert [each.target_node for each in gang.pods] == ["t0", "t1"]
    assert select_gang_to_bind("a", changes, room) is None, "the room is occupied"


def test_host_ports_of_bound_pods_are_taken() -> None:
    requests = tuple(compute_port_requests({"containers": [{"ports": [{"hostPort": 8080}]}]}).items())
    waiting = pod("t0", 2, bound=False, requests=requests)
    changes = plan_pod_changes(on({"t0": (0, 1)}), [waiting], NOW_S)
    node = {"t0": replace(nodes(t0=8)["t0"], allocatable=())}
    assert select_gang_to_bind("a", changes, FreeGpus(node, {}, {"t0": requests})) is None
    assert select_gang_to_bind("a", changes, FreeGpus(node, {}, {})) is not None


def test_terminating_pods_occupy_their_node() -> None:
    leaving = replace(pod("t0", 2, is_deleting=True), job_id="b")
    changes = plan_pod_changes(on({"t0": (0, 1)}), [pod("t0", 2, bound=False)], NOW_S)
    assert select_gang_to_bind("a", changes, FreeGpus(nodes(t0=2), count_held_gpus([leaving]))) is None
    assert select_gang_to_bind("a", changes, FreeGpus(nodes(t0=2), count_held_gpus([]))) is not None


def test_pod_waits_for_its_predecessor_on_the_node() -> None:
    """Agents are identified by job and node, so that two of them would be confused."""
    before, after = pod("t0", 2, is_deleting=True), pod("t0", 4, generation=2, bound=False)
    job = on({"t0": (0, 1, 2, 3)}, generation=2)
    both = plan_pod_changes(job, [before, after], NOW_S)
    assert select_gang_to_bind("a", both, FreeGpus(nodes(t0=8), count_held_gpus([before]))) is None
    alone = plan_pod_changes(job, [after], NOW_S)
    assert select_gang_to_bind("a", alone, FreeGpus(nodes(t0=8), {})) is not None


def test_stuck_pod_does_not_block_a_new_name() -> None:
    """The pod was deleted, and a foreign finalizer may hold it forever."""
    job, others = on({"t0": (0,), "t1": (0,)}), [pod("t0", 1, bound=False)]
    kept = replace(pod("t1", 1, is_deleting=True, phase="Failed"), name="a-g1-1")
    changes = plan_pod_changes(job, [*others, kept], NOW_S)
    assert [(new.name, new.node) for new in changes.create] == [("a-g1-1-1", "t1")]
    assert not changes.is_gang_complete
    again = replace(kept, name="a-g1-1-1")
    assert [new.name for new in plan_pod_changes(job, [*others, kept, again], NOW_S).create] == ["a-g1-1-2"]
    created = replace(pod("t1", 1, bound=False), name="a-g1-1-1")
    assert plan_pod_changes(job, [*others, kept, created], NOW_S).is_gang_complete


def test_incomplete_gang_is_not_bound() -> None:
    changes = plan_pod_changes(on({"t0": (0,), "t1": (0,)}), [pod("t0", 1, bound=False)], NOW_S)
    assert select_gang_to_bind("a", changes, FreeGpus(nodes(t0=8, t1=8), {})) is None


def test_bound_pods_are_not_bound_again() -> None:
    pods = [pod("t0", 1), pod("t1", 1, generation=2, bound=False)]
    changes = plan_pod_changes(on({"t0": (0,), "t1": (0,)}, generation=2), pods, NOW_S)
    gang = select_gang_to_bind("a", changes, FreeGpus(nodes(t0=1, t1=1), count_held_gpus(pods)))
    assert gang is not None
    assert [each.target_node for each in gang.pods] == ["t1"]
