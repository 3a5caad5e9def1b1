"""Pools, Queues and nodes of the cluster, and what becomes of the fleet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.commands import AddNode, CordonNode, RemoveNode
from scheduler.domain.fleet import PoolKind
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.api_objects import NODE, POOL, QUEUE
from tests.builders import a_job, a_loan
from tests.unit.kubernetes.operating import Operating

TRAIN, SERVE = {"role": "train"}, {"role": "serve"}


def a_fleet_rig() -> Operating:
    """Pools `training` (t0) and `serving` (s0, s1), taken in."""
    rig = Operating()
    rig.server.add(POOL, "training", {"kind": "training", "nodeSelector": TRAIN})
    rig.server.add(POOL, "serving", {"kind": "inference", "nodeSelector": SERVE, "lending": {"returnDeadline": "2m"}})
    rig.add_node("t0", TRAIN)
    for name in ("s0", "s1"):
        rig.add_node(name, SERVE)
    rig.settle()
    return rig


def condition(rig: Operating, pool: str, kind: str) -> tuple[str, str, str]:
    status = rig.server.get(POOL, pool)["status"]
    (found,) = [each for each in status["conditions"] if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


def test_pools_are_created_and_the_nodes_that_bear_their_labels_join_them() -> None:
    rig = a_fleet_rig()
    nodes = {name: (node.pool, node.gpu, node.gpus) for name, node in rig.snapshot.nodes.items()}
    assert nodes == {
        "t0": ("training", "a100-80g", 8),
        "s0": ("serving", "a100-80g", 8),
        "s1": ("serving", "a100-80g", 8),
    }
    assert rig.snapshot.pools["serving"].lending.return_deadline_s == 120.0
    status = rig.server.get(POOL, "serving")["status"]
    assert (status["nodes"], status["gpus"], status["lentNodes"]) == (2, 16, 0)
    assert "problem" not in status


def test_a_pool_that_comes_while_a_tick_runs_waits_for_the_next_round() -> None:
    rig = a_fleet_rig()
    taken = rig.take()
    rig.server.add(POOL, "late", {"kind": "training", "nodeSelector": {"role": "late"}})
    assert rig.steps(taken=taken) == ()
    rig.settle()
    assert condition(rig, "late", "Accepted")[0] == "True"


def test_a_change_of_lending_is_passed_on_and_one_over_http_is_taken_back() -> None:
    rig = a_fleet_rig()
    rig.server.change(POOL, "serving", lending={"maxLentNodes": 1, "minLoan": "1h"})
    assert rig.round() == ["SetLendingPolicy"]
    lending = rig.snapshot.pools["serving"].lending
    assert (lending.lent_nodes_max, lending.loan_s_min, lending.return_deadline_s) == (1, 3600.0, 120.0)
    changed = replace(rig.snapshot.pools["serving"], lending=replace(lending, enabled=False))
    rig.snapshot = replace(rig.snapshot, pools={**rig.snapshot.pools, "serving": changed})
    assert rig.round() == ["SetLendingPolicy"]
    assert rig.snapshot.pools["serving"].lending == lending


def test_a_command_that_waits_in_the_inbox_is_not_sent_again() -> None:
    rig = Operating()
    rig.server.add(QUEUE, "research", {"guaranteed": 8})
    rig.send(*rig.take().commands)
    rig.snapshot = replace(rig.snapshot, generation=7)
    assert rig.take().commands == ()


def test_the_older_of_two_pools_keeps_a_node_that_both_select() -> None:
    rig = a_fleet_rig()
    rig.server.add(
        POOL, "greedy", {"kind": "training", "nodeSelector": TRAIN}, creationTimestamp="2026-11-23T00:00:00Z"
    )
    rig.settle()
    assert rig.snapshot.nodes["t0"].pool == "training"
    holds, reason, message = condition(rig, "greedy", "Conflict")
    assert (holds, reason) == ("True", "SelectorsOverlap")
    assert "t0 (of Pool training)" in message
    assert condition(rig, "training", "Conflict")[0] == "False"
    assert rig.server.get(POOL, "greedy")["status"]["problem"] == "SelectorsOverlap"


def test_a_selector_that_matches_nothing_is_told_with_its_labels() -> None:
    rig = a_fleet_rig()
    rig.server.add(POOL, "empty", {"kind": "training", "nodeSelector": {"role": "nobody"}})
    rig.settle()
    message = "nodeSelector: no node bears the labels role=nobody"
    assert condition(rig, "empty", "Matched") == ("False", "NoNodeMatches", message)


def test_nodes_without_gpus_or_of_an_unknown_model_are_named_and_not_registered() -> None:
    rig = a_fleet_rig()
    rig.add_node("bare", TRAIN, gpus=0)
    rig.add_node("odd", TRAIN, product="NVIDIA-A100-SXM4-80GB-SHARED")
    rig.settle()
    assert {"bare", "odd"}.isdisjoint(rig.snapshot.nodes)
    holds, reason, message = condition(rig, "training", "NodesUsable")
    assert (holds, reason) == ("False", "UnknownGpuModel")
    assert 'odd ("NVIDIA-A100-SXM4-80GB-SHARED")' in message
    assert "nodes without allocatable nvidia.com/gpu: bare" in message


def test_a_pool_or_a_label_says_the_gpu_model() -> None:
    rig = Operating()
    rig.server.add(POOL, "said", {"kind": "training", "nodeSelector": TRAIN, "gpu": "t4", "gpuMemory": "15GiB"})
    rig.server.add(POOL, "labelled", {"kind": "training", "nodeSelector": SERVE})
    rig.add_node("t0", TRAIN, product="")
    rig.add_node("s0", {**SERVE, "ebbtide.dev/gpu": "cpu"})
    rig.settle()
    assert {node.name: node.gpu for node in rig.snapshot.nodes.values()} == {"t0": "t4", "s0": "cpu"}
    assert rig.snapshot.nodes["t0"].gpu_memory_bytes == 15 * 2**30


def test_a_cordon_of_the_cluster_comes_and_goes_and_one_over_http_stays() -> None:
    rig = a_fleet_rig()
    rig.server.change(NODE, "s0", unschedulable=True)
    assert rig.round() == ["CordonNode"]
    rig.settle()
    assert rig.snapshot.nodes["s0"].cordoned
    assert rig.server.get(POOL, "serving")["status"]["cordonedNodes"] == ["s0"]
    by_http = replace(rig.snapshot.nodes["s1"], cordoned=True)
    rig.snapshot = replace(rig.snapshot, nodes={**rig.snapshot.nodes, "s1": by_http})
    rig.settle()
    rig.server.change(NODE, "s0", unschedulable=None)
    assert rig.round() == ["UncordonNode"]
    rig.settle()
    assert (rig.snapshot.nodes["s0"].cordoned, rig.snapshot.nodes["s1"].cordoned) == (False, True)
    assert rig.server.get(POOL, "serving")["status"]["cordonedNodes"] == []


def test_a_node_whose_gpus_are_gone_for_now_takes_nothing_new_and_is_not_drained() -> None:
    rig = a_fleet_rig()
    rig.server.get(NODE, "t0")["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    rig.settle()
    assert (rig.snapshot.nodes["t0"].cordoned, rig.snapshot.nodes["t0"].draining) == (True, False)
    rig.server.get(NODE, "t0")["status"]["allocatable"]["nvidia.com/gpu"] = "8"
    rig.settle()
    assert not rig.snapshot.nodes["t0"].cordoned


def taint(rig: Operating, node: str, *texts: str) -> None:
    keyed = (text.rpartition(":") for text in texts)
    split = ((*name.partition("="), effect) for name, _, effect in keyed)
    taints = [{"key": key, "effect": effect, **({"value": value} if value else {})} for key, _, value, effect in split]
    rig.server.change(NODE, node, taints=taints)


def test_nothing_new_starts_on_a_node_that_another_has_tainted_and_its_pool_says_so() -> None:
    rig = a_fleet_rig()
    taint(rig, "t0", "ToBeDeletedByClusterAutoscaler=1732:NoSchedule", "team=harbour:NoExecute")
    assert rig.round() == ["CordonNode"]
    rig.settle()
    assert (rig.snapshot.nodes["t0"].cordoned, rig.snapshot.nodes["t0"].draining) == (True, False)
    holds, reason, message = condition(rig, "training", "NodesUsable")
    assert (holds, reason) == ("False", "TaintsNotTolerated")
    assert "t0 (ToBeDeletedByClusterAutoscaler=1732:NoSchedule, team=harbour:NoExecute); set tolerations" in message
    taint(rig, "t0")
    assert rig.round() == ["UncordonNode"]
    rig.settle()
    assert condition(rig, "training", "NodesUsable") == ("True", "GpusKnown", "")


@pytest.mark.parametrize(
    "text",
    [
        "nvidia.com/gpu=present:NoSchedule",
        "busy:PreferNoSchedule",
        "ebbtide.dev/loaned=training:NoSchedule",
        "node.kubernetes.io/unreachable:NoExecute",
    ],
)
def test_taints_that_say_nothing_against_training_leave_a_node_open(text: str) -> None:
    rig = a_fleet_rig()
    taint(rig, "s0", text)
    assert rig.take().fleet.bodies == {}


@pytest.mark.parametrize(
    ("toleration", "bears"),
    [
        ({"key": "dedicated", "value": "serving"}, True),
        ({"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "dedicated", "value": "training"}, False),
        ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "dedicated"}, False),
        ({"key": "team", "operator": "Exists"}, False),
    ],
)
def test_a_pool_tolerates_the_taints_that_keep_its_nodes_for_it(toleration: dict[str, str], bears: bool) -> None:
    rig = a_fleet_rig()
    taint(rig, "s0", "dedicated=serving:NoSchedule")
    rig.server.change(POOL, "serving", tolerations=[toleration])
    rig.settle()
    assert rig.snapshot.nodes["s0"].cordoned is not bears


@pytest.mark.parametrize(
    ("toleration", "message"),
    [
        ({"value": "serving"}, "tolerations.0.key"),
        ({"key": "dedicated", "operator": "Exists", "value": "serving"}, "tolerations.0.value"),
        ({"key": "dedicated", "effect": "Never"}, "tolerations.0.effect"),
    ],
)
def test_a_toleration_that_kubernetes_would_refuse_is_refused(toleration: dict[str, str], message: str) -> None:
    rig = a_fleet_rig()
    rig.server.change(POOL, "serving", tolerations=[toleration])
    rig.settle()
    holds, reason, told = condition(rig, "serving", "Accepted")
    assert (holds, reason) == ("False", "Refused")
    assert message in told


def in_use(rig: Operating, node: str) -> None:
    job = a_job("llama-1", 2, state=JobState.RUNNING, on={node: (0, 1)}, resource_uid="u")
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job})


def test_a_node_that_is_no_pools_any_more_is_drained_first_and_removed_once_nobody_holds_it() -> None:
    rig = a_fleet_rig()
    in_use(rig, "t0")
    rig.server.get(NODE, "t0")["metadata"]["labels"] = {}
    fleet = rig.take().fleet
    assert list(fleet.bodies.values()) == [CordonNode("t0", drain=True)]
    rig.round()
    assert rig.take().fleet.bodies == {}
    rig.snapshot = replace(rig.snapshot, jobs={})
    assert list(rig.take().fleet.bodies.values()) == [RemoveNode("t0")]


def test_a_lent_node_is_not_removed_before_it_is_home() -> None:
    rig = a_fleet_rig()
    rig.snapshot = replace(rig.snapshot, loans={"s0": replace(a_loan("s0"), pool="serving")})
    del rig.server.objects["Node", "", "s0"]
    assert rig.take().fleet.bodies == {}
    rig.snapshot = replace(rig.snapshot, loans={})
    assert list(rig.take().fleet.bodies.values()) == [RemoveNode("s0")]


def test_a_node_with_another_number_of_gpus_leaves_and_joins_anew() -> None:
    rig = a_fleet_rig()
    rig.server.get(NODE, "t0")["status"]["allocatable"]["nvidia.com/gpu"] = "7"
    kinds = [rig.round() for _ in range(3)]
    assert kinds == [["CordonNode"], ["RemoveNode"], ["AddNode"]]
    assert (rig.snapshot.nodes["t0"].gpus, rig.snapshot.nodes["t0"].draining) == (7, False)


def test_a_cordoned_node_joins_cordoned() -> None:
    rig = a_fleet_rig()
    rig.add_node("t1", TRAIN, unschedulable=True)
    (add,) = rig.take().fleet.bodies.values()
    assert isinstance(add, AddNode)
    assert add.node.cordoned


def test_a_deleted_pool_waits_for_its_nodes() -> None:
    rig = a_fleet_rig()
    in_use(rig, "t0")
    rig.server.ask_delete(POOL, "training")
    rig.round()
    rig.round()
    assert condition(rig, "training", "Accepted") == (
        "False",
        "Deleting",
        "1 nodes have to be left by their jobs first: t0",
    )
    rig.snapshot = replace(rig.snapshot, jobs={})
    for _ in range(3):
        rig.round()
    assert "training" not in rig.snapshot.pools
    assert [item["metadata"]["name"] for item in rig.server.resources().pools] == ["serving"]


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"kind": "training"}, "KindChanged", 'kind: got "training"; allowed: inference'),
        ({"kind": 7}, "Refused", "kind: got 7"),
        ({"nodeSelector": 7}, "Refused", "nodeSelector: got 7"),
        ({"nodeSelector": None}, "Refused", "nodeSelector: got nothing"),
        ({"lending": {"quantile": 2}}, "Refused", "lending.quantile: got 2"),
        ({"lending": {"minLoan": "30h"}}, "Refused", "lending.minLoan: got 108000"),
        ({"lending": {"returnDeadline": 0, "coldStart": "0s"}}, "Refused", "allowed: above 0 s, where coldStart is 0"),
        ({"lending": {"blackouts": [{"start": "30h", "end": 0}]}}, "Refused", "blackouts"),
        ({"demand": {"source": "prometheus"}}, "Refused", "demand.query: got nothing; allowed: a value"),
        ({"demand": {"source": "push", "query": "x"}}, "Refused", "demand.query"),
    ],
)
def test_nonsense_in_a_pool_is_told_and_its_nodes_stay(change: dict[str, Any], reason: str, words: str) -> None:
    rig = a_fleet_rig()
    before = rig.snapshot
    if change.get("kind") == "training":
        rig.server.change(POOL, "serving", lending=None)
    rig.server.change(POOL, "serving", **change)
    rig.settle()
    told = condition(rig, "serving", "Accepted")
    assert told[:2] == ("False", reason)
    assert words in told[2]
    assert (rig.snapshot.nodes, rig.snapshot.pools["serving"].kind) == (before.nodes, PoolKind.INFERENCE)


def test_pools_and_nodes_that_no_resource_made_are_left_alone() -> None:
    rig = a_fleet_rig()
    for key in [key for key in rig.server.objects if key[0] in ("Pool", "Node")]:
        del rig.server.objects[key]
    assert rig.take().commands == ()


def test_queues_are_declared_changed_and_taken_back() -> None:
    rig = Operating()
    rig.server.add(QUEUE, "research", {"guaranteed": 8})
    assert rig.round() == ["CreateQueue"]
    rig.settle()
    rig.server.change(QUEUE, "research", limit=16, weight=2, userLimit=4)
    assert rig.round() == ["ChangeQueue"]
    assert rig.snapshot.queues["research"] == JobQueue("research", 8, 16, 2.0, 4)
    rig.settle()
    rig.server.change(QUEUE, "research", limit=4)
    rig.settle()
    (told,) = rig.server.get(QUEUE, "research")["status"]["conditions"]
    assert (told["status"], told["message"]) == (
        "False",
        "limit: got 4; allowed: nothing, or at least guaranteed, which is 8",
    )
    rig.server.ask_delete(QUEUE, "research")
    assert rig.round() == ["DeleteQueue"]
    rig.publish()
    assert rig.server.resources().queues == ()
