"""Commands for Pools, Queues and nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.commands import AddNode, CordonNode, RemoveNode
from scheduler.domain.fleet import PoolKind, PoolNetwork
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingMode
from scheduler.kubernetes.api_objects import NODE, POOL, QUEUE
from scheduler.solver.profiles import catalog
from tests.builders import a_job, a_loan
from tests.unit.kubernetes.operator_rig import OperatorRig

TRAIN, SERVE = {"role": "train"}, {"role": "serve"}


def build_fleet() -> OperatorRig:
    """Return a rig with the Pools `training` (t0) and `serving` (s0, s1)."""
    rig = OperatorRig()
    rig.server.add(POOL, "training", {"kind": "training", "nodeSelector": TRAIN})
    rig.server.add(POOL, "serving", {"kind": "inference", "nodeSelector": SERVE, "lending": {"returnDeadline": "2m"}})
    rig.add_node("t0", TRAIN)
    for name in ("s0", "s1"):
        rig.add_node(name, SERVE)
    rig.run_until_stable()
    return rig


def condition(rig: OperatorRig, pool: str, kind: str) -> tuple[str, str, str]:
    status = rig.server.get(POOL, pool)["status"]
    (found,) = [each for each in status["conditions"] if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


def test_pools_are_created_and_matching_nodes_join() -> None:
    rig = build_fleet()
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


def test_pool_created_during_a_tick_is_handled_in_the_next_round() -> None:
    rig = build_fleet()
    taken = rig.compute_commands()
    rig.server.add(POOL, "late", {"kind": "training", "nodeSelector": {"role": "late"}})
    assert rig.compute_writes(spec_commands=taken) == ()
    rig.run_until_stable()
    assert condition(rig, "late", "Accepted")[0] == "True"


def test_lending_policy_follows_the_pool_resource() -> None:
    rig = build_fleet()
    rig.server.change(POOL, "serving", lending={"maxLentNodes": 1, "minLoan": "1h", "mode": "shadow", "notice": "15m"})
    assert rig.run_round() == ["SetLendingPolicy"]
    lending = rig.snapshot.pools["serving"].lending
    assert (lending.lent_nodes_max, lending.loan_s_min, lending.return_deadline_s) == (1, 3600.0, 120.0)
    assert (lending.mode, lending.notice_s, lending.veto_s) == (LendingMode.SHADOW, 900.0, 3600.0)
    changed = replace(rig.snapshot.pools["serving"], lending=replace(lending, enabled=False))
    rig.snapshot = replace(rig.snapshot, pools={**rig.snapshot.pools, "serving": changed})
    assert rig.run_round() == ["SetLendingPolicy"]
    assert rig.snapshot.pools["serving"].lending == lending


def test_network_follows_the_pool_resource() -> None:
    rig = build_fleet()
    network = {"bandwidth": "20GB", "latency": "0.01ms", "nicsPerNode": 4}
    rig.server.change(POOL, "training", network=network)
    assert rig.run_round() == ["SetPoolNetwork"]
    assert rig.snapshot.pools["training"].network == PoolNetwork(20e9, 1e-5, 4)
    assert rig.run_round() == []
    rig.server.change(POOL, "training", network={**network, "nicsPerNode": 0})
    assert rig.run_round() == []
    assert "network.nics_per_node must be 1 to 1024, got 0" in condition(rig, "training", "Accepted")[2]


def test_pending_command_is_not_sent_again() -> None:
    rig = OperatorRig()
    rig.server.add(QUEUE, "research", {"guaranteed": 8})
    rig.send(*rig.compute_commands().commands)
    rig.snapshot = replace(rig.snapshot, generation=7)
    assert rig.compute_commands().commands == ()


def test_oldest_matching_pool_gets_the_node() -> None:
    rig = build_fleet()
    rig.server.add(
        POOL, "greedy", {"kind": "training", "nodeSelector": TRAIN}, creationTimestamp="2026-11-23T00:00:00Z"
    )
    rig.run_until_stable()
    assert rig.snapshot.nodes["t0"].pool == "training"
    holds, reason, message = condition(rig, "greedy", "Conflict")
    assert (holds, reason) == ("True", "SelectorsOverlap")
    assert "t0 (of Pool training)" in message
    assert condition(rig, "training", "Conflict")[0] == "False"
    assert rig.server.get(POOL, "greedy")["status"]["problem"] == "SelectorsOverlap"


def test_selector_without_match_sets_the_condition() -> None:
    rig = build_fleet()
    rig.server.add(POOL, "empty", {"kind": "training", "nodeSelector": {"role": "nobody"}})
    rig.run_until_stable()
    status, reason, message = condition(rig, "empty", "Matched")
    assert (status, reason) == ("False", "NoNodeMatches")
    assert "role=nobody" in message


def test_unusable_nodes_are_reported_and_not_registered() -> None:
    rig = build_fleet()
    rig.add_node("bare", TRAIN, gpus=0)
    rig.add_node("odd", TRAIN, product="")
    rig.add_node("sliced", TRAIN, product="NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", gpus=56)
    rig.run_until_stable()
    assert {"bare", "odd", "sliced"}.isdisjoint(rig.snapshot.nodes)
    holds, reason, message = condition(rig, "training", "NodesUsable")
    assert (holds, reason) == ("False", "UnknownGpuModel")
    assert 'odd ("")' in message
    assert "sliced (mig)" in message
    assert "nodes without allocatable nvidia.com/gpu: bare" in message


def test_a_product_without_a_profile_joins_with_an_estimated_one() -> None:
    rig = build_fleet()
    rig.add_node("new", TRAIN, product="NVIDIA-A30")
    fleet = rig.compute_commands().fleet
    assert set(fleet.estimated_gpus) == {"a30-24g"}
    rig.run_until_stable()
    assert (rig.snapshot.nodes["new"].gpu, rig.snapshot.nodes["new"].gpu_memory_bytes) == ("a30-24g", 24576 * 2**20)
    assert condition(rig, "training", "NodesUsable")[:2] == ("True", "GpusEstimated")


def test_memory_that_no_label_states_is_named() -> None:
    rig = build_fleet()
    rig.add_node("new", TRAIN, product="NVIDIA-Z900")
    rig.run_until_stable()
    holds, reason, message = condition(rig, "training", "NodesUsable")
    assert (holds, reason) == ("True", "GpusEstimated")
    assert "z900-8g (8 GiB of memory, assumed without a label nvidia.com/gpu.memory)" in message


def test_a_pool_with_an_unknown_gpu_is_not_accepted() -> None:
    rig = OperatorRig()
    rig.server.add(POOL, "training", {"kind": "training", "nodeSelector": TRAIN, "gpu": "h100-80gb"})
    rig.run_until_stable()
    holds, reason, message = condition(rig, "training", "Accepted")
    assert (holds, reason) == ("False", "Refused")
    assert "h100-80g" in message


def test_an_accepted_pool_keeps_nodes_and_policy_while_its_new_gpu_is_unknown() -> None:
    rig = build_fleet()
    before = rig.snapshot
    changed = {"nodeSelector": SERVE, "gpu": "a100-80gb", "lending": {"returnDeadline": "9m"}}
    rig.server.change(POOL, "serving", "", **changed)
    rig.run_until_stable()
    assert condition(rig, "serving", "Accepted")[:2] == ("False", "Refused")
    assert (rig.snapshot.nodes, rig.snapshot.pools) == (before.nodes, before.pools)
    rig.server.change(POOL, "serving", "", gpu="a100-80g")
    rig.run_until_stable()
    assert condition(rig, "serving", "Accepted")[0] == "True"
    assert rig.snapshot.pools["serving"].lending.return_deadline_s == 540.0


def test_a_pool_may_name_an_estimated_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_estimates", {"a30-24g": "{}"})
    rig = OperatorRig()
    rig.server.add(POOL, "training", {"kind": "training", "nodeSelector": TRAIN, "gpu": "a30-24g"})
    rig.run_until_stable()
    assert condition(rig, "training", "Accepted")[0] == "True"


def test_gpu_model_comes_from_the_pool_or_the_label() -> None:
    rig = OperatorRig()
    rig.server.add(POOL, "said", {"kind": "training", "nodeSelector": TRAIN, "gpu": "t4", "gpuMemory": "15GiB"})
    rig.server.add(POOL, "labelled", {"kind": "training", "nodeSelector": SERVE})
    rig.add_node("t0", TRAIN, product="")
    rig.add_node("s0", {**SERVE, "ebbtide.dev/gpu": "cpu"})
    rig.run_until_stable()
    assert {node.name: node.gpu for node in rig.snapshot.nodes.values()} == {"t0": "t4", "s0": "cpu"}
    assert rig.snapshot.nodes["t0"].gpu_memory_bytes == 15 * 2**30


def test_cluster_cordon_is_followed_and_http_cordon_stays() -> None:
    rig = build_fleet()
    rig.server.change(NODE, "s0", unschedulable=True)
    assert rig.run_round() == ["CordonNode"]
    rig.run_until_stable()
    assert rig.snapshot.nodes["s0"].cordoned
    assert rig.server.get(POOL, "serving")["status"]["cordonedNodes"] == ["s0"]
    by_http = replace(rig.snapshot.nodes["s1"], cordoned=True)
    rig.snapshot = replace(rig.snapshot, nodes={**rig.snapshot.nodes, "s1": by_http})
    rig.run_until_stable()
    rig.server.change(NODE, "s0", unschedulable=None)
    assert rig.run_round() == ["UncordonNode"]
    rig.run_until_stable()
    assert (rig.snapshot.nodes["s0"].cordoned, rig.snapshot.nodes["s1"].cordoned) == (False, True)
    assert rig.server.get(POOL, "serving")["status"]["cordonedNodes"] == []


def test_label_decides_whether_a_node_is_lendable() -> None:
    rig = build_fleet()
    labels = rig.server.get(NODE, "s0")["metadata"]["labels"]
    labels["ebbtide.dev/lendable"] = "false"
    assert rig.run_round() == ["ChangeNode"]
    rig.add_node("s2", {**SERVE, "ebbtide.dev/lendable": "false"})
    rig.run_until_stable()
    assert {name: node.lendable for name, node in rig.snapshot.nodes.items() if node.pool == "serving"} == {
        "s0": False,
        "s1": True,
        "s2": False,
    }
    del labels["ebbtide.dev/lendable"]
    assert rig.run_round() == ["ChangeNode"]
    assert rig.snapshot.nodes["s0"].lendable


def test_label_decides_how_many_gpus_of_a_node_are_lent() -> None:
    rig = build_fleet()
    labels = rig.server.get(NODE, "s0")["metadata"]["labels"]
    labels["ebbtide.dev/lendable-gpus"] = "3"
    assert rig.run_round() == ["ChangeNode"]
    rig.run_until_stable()
    assert rig.snapshot.nodes["s0"].lendable_gpus == (5, 6, 7)
    for wrong in ("0", "8", "-1", "3.5", "all", ""):
        labels["ebbtide.dev/lendable-gpus"] = wrong
        rig.run_until_stable()
        assert not rig.snapshot.nodes["s0"].lendable, wrong
    status, reason, message = condition(rig, "serving", "NodesUsable")
    assert (status, reason) == ("False", "LendableGpusInvalid")
    assert "s0" in message
    del labels["ebbtide.dev/lendable-gpus"]
    rig.run_until_stable()
    node = rig.snapshot.nodes["s0"]
    assert node.lendable
    assert not node.lendable_gpus


def test_node_without_gpus_is_cordoned_but_not_drained() -> None:
    rig = build_fleet()
    rig.server.get(NODE, "t0")["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    rig.run_until_stable()
    assert (rig.snapshot.nodes["t0"].cordoned, rig.snapshot.nodes["t0"].draining) == (True, False)
    rig.server.get(NODE, "t0")["status"]["allocatable"]["nvidia.com/gpu"] = "8"
    rig.run_until_stable()
    assert not rig.snapshot.nodes["t0"].cordoned


def taint(rig: OperatorRig, node: str, *texts: str) -> None:
    keyed = (text.rpartition(":") for text in texts)
    split = ((*name.partition("="), effect) for name, _, effect in keyed)
    taints = [{"key": key, "effect": effect, **({"value": value} if value else {})} for key, _, value, effect in split]
    rig.server.change(NODE, node, taints=taints)


TAINTS = ("ToBeDeletedByClusterAutoscaler=1732:NoSchedule", "team=harbour:NoExecute")


def test_training_node_with_untolerated_taint_is_reported_and_left_to_jobs_that_tolerate_it() -> None:
    rig = build_fleet()
    taint(rig, "t0", *TAINTS)
    rig.run_until_stable()
    assert not rig.snapshot.nodes["t0"].cordoned
    holds, reason, message = condition(rig, "training", "NodesUsable")
    assert (holds, reason) == ("False", "TaintsNotTolerated")
    assert f"t0 ({', '.join(TAINTS)})" in message
    taint(rig, "t0")
    rig.run_until_stable()
    assert condition(rig, "training", "NodesUsable") == ("True", "GpusKnown", "")


def test_inference_node_with_untolerated_taint_is_cordoned_and_not_lent() -> None:
    rig = build_fleet()
    taint(rig, "s0", *TAINTS)
    assert rig.run_round() == ["CordonNode"]
    rig.run_until_stable()
    assert (rig.snapshot.nodes["s0"].cordoned, rig.snapshot.nodes["s0"].draining) == (True, False)
    taint(rig, "s0")
    assert rig.run_round() == ["UncordonNode"]


@pytest.mark.parametrize(
    "text",
    [
        "nvidia.com/gpu=present:NoSchedule",
        "busy:PreferNoSchedule",
        "ebbtide.dev/loaned=training:NoSchedule",
        "node.kubernetes.io/unreachable:NoExecute",
    ],
)
def test_harmless_taints_do_not_cordon_a_node(text: str) -> None:
    rig = build_fleet()
    taint(rig, "s0", text)
    assert rig.compute_commands().fleet.bodies == {}


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
def test_pool_tolerations_keep_nodes_schedulable(toleration: dict[str, str], bears: bool) -> None:
    rig = build_fleet()
    taint(rig, "s0", "dedicated=serving:NoSchedule")
    rig.server.change(POOL, "serving", tolerations=[toleration])
    rig.run_until_stable()
    assert rig.snapshot.nodes["s0"].cordoned is not bears


@pytest.mark.parametrize(
    ("toleration", "message"),
    [
        ({"value": "serving"}, "tolerations.0.key"),
        ({"key": "dedicated", "operator": "Exists", "value": "serving"}, "tolerations.0.value"),
        ({"key": "dedicated", "effect": "Never"}, "tolerations.0.effect"),
    ],
)
def test_invalid_toleration_is_rejected(toleration: dict[str, str], message: str) -> None:
    rig = build_fleet()
    rig.server.change(POOL, "serving", tolerations=[toleration])
    rig.run_until_stable()
    holds, reason, reported = condition(rig, "serving", "Accepted")
    assert (holds, reason) == ("False", "Refused")
    assert message in reported


def in_use(rig: OperatorRig, node: str) -> None:
    job = a_job("llama-1", 2, state=JobState.RUNNING, on={node: (0, 1)}, resource_uid="u")
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job})


def test_node_without_pool_is_drained_then_removed() -> None:
    rig = build_fleet()
    in_use(rig, "t0")
    rig.server.get(NODE, "t0")["metadata"]["labels"] = {}
    fleet = rig.compute_commands().fleet
    assert list(fleet.bodies.values()) == [CordonNode("t0", drain=True)]
    rig.run_round()
    assert rig.compute_commands().fleet.bodies == {}
    rig.snapshot = replace(rig.snapshot, jobs={})
    assert list(rig.compute_commands().fleet.bodies.values()) == [RemoveNode("t0")]


def test_lent_node_is_not_removed_before_its_return() -> None:
    rig = build_fleet()
    rig.snapshot = replace(rig.snapshot, loans={"s0": replace(a_loan("s0"), pool="serving")})
    del rig.server.objects["Node", "", "s0"]
    assert rig.compute_commands().fleet.bodies == {}
    rig.snapshot = replace(rig.snapshot, loans={})
    assert list(rig.compute_commands().fleet.bodies.values()) == [RemoveNode("s0")]


def test_node_with_changed_gpu_count_is_registered_again() -> None:
    rig = build_fleet()
    rig.server.get(NODE, "t0")["status"]["allocatable"]["nvidia.com/gpu"] = "7"
    kinds = [rig.run_round() for _ in range(3)]
    assert kinds == [["CordonNode"], ["RemoveNode"], ["AddNode"]]
    assert (rig.snapshot.nodes["t0"].gpus, rig.snapshot.nodes["t0"].draining) == (7, False)


def test_cordoned_node_joins_cordoned() -> None:
    rig = build_fleet()
    rig.add_node("t1", TRAIN, unschedulable=True)
    (add,) = rig.compute_commands().fleet.bodies.values()
    assert isinstance(add, AddNode)
    assert add.node.cordoned


def test_deleted_pool_waits_for_its_nodes() -> None:
    rig = build_fleet()
    in_use(rig, "t0")
    rig.server.delete(POOL, "training")
    rig.run_round()
    rig.run_round()
    status, reason, message = condition(rig, "training", "Accepted")
    assert (status, reason) == ("False", "Deleting")
    assert message.endswith(": t0")
    rig.snapshot = replace(rig.snapshot, jobs={})
    for _ in range(3):
        rig.run_round()
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
        ({"lending": {"returnDeadline": 0, "coldStart": "0s"}}, "Refused", "allowed: above 0 s if coldStart is 0"),
        ({"lending": {"blackouts": [{"start": "30h", "end": 0}]}}, "Refused", "blackouts"),
        ({"demand": {"source": "prometheus"}}, "Refused", "demand.query: got nothing; allowed: a value"),
        ({"demand": {"source": "push", "query": "x"}}, "Refused", "demand.query"),
    ],
)
def test_invalid_pool_is_reported_and_keeps_its_nodes(change: dict[str, Any], reason: str, words: str) -> None:
    rig = build_fleet()
    before = rig.snapshot
    if change.get("kind") == "training":
        rig.server.change(POOL, "serving", lending=None)
    rig.server.change(POOL, "serving", **change)
    rig.run_until_stable()
    reported = condition(rig, "serving", "Accepted")
    assert reported[:2] == ("False", reason)
    assert words in reported[2]
    assert (rig.snapshot.nodes, rig.snapshot.pools["serving"].kind) == (before.nodes, PoolKind.INFERENCE)


def test_pools_without_resource_are_untouched() -> None:
    rig = build_fleet()
    for key in [key for key in rig.server.objects if key[0] in ("Pool", "Node")]:
        del rig.server.objects[key]
    assert rig.compute_commands().commands == ()


def test_queues_are_created_changed_and_deleted() -> None:
    rig = OperatorRig()
    rig.server.add(QUEUE, "research", {"guaranteed": 8})
    assert rig.run_round() == ["CreateQueue"]
    rig.run_until_stable()
    rig.server.change(QUEUE, "research", limit=16, weight=2, userLimit=4)
    assert rig.run_round() == ["ChangeQueue"]
    assert rig.snapshot.queues["research"] == JobQueue("research", 8, 16, 2.0, 4)
    rig.run_until_stable()
    rig.server.change(QUEUE, "research", limit=4)
    rig.run_until_stable()
    (reported,) = rig.server.get(QUEUE, "research")["status"]["conditions"]
    assert reported["status"] == "False"
    assert reported["message"].startswith("limit: got 4;")
    rig.server.delete(QUEUE, "research")
    assert rig.run_round() == ["DeleteQueue"]
    rig.write()
    assert rig.server.resources().queues == ()


def test_served_models_follow_the_pool_resource() -> None:
    rig = build_fleet()
    rig.run_until_stable()
    served = {"model": "llama-3-8b", "gpu": "rtx-4090", "objective": {"ttft": "1s", "tpot": "50ms"}}
    rig.server.change(POOL, "serving", serving=[served])
    assert rig.run_round() == ["SetServedModels"]
    assert [each.model for each in rig.snapshot.pools["serving"].serving] == ["llama-3-8b"]
    rig.server.change(POOL, "serving", serving=[{**served, "objective": {"ttft": "1s", "tpot": "1ms"}}])
    rig.run_round()
    _, reason, message = condition(rig, "serving", "Accepted")
    assert reason == "Refused"
    assert "objective.tpot" in message
    assert [each.tpot_s for each in rig.snapshot.pools["serving"].serving] == [0.05]
