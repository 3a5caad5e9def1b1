"""Cluster files: parsing and validation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduler.documents.simulation import (
    ClusterDocument,
    ClusterError,
    build_nodes,
    build_pools,
    build_queues,
    read_cluster,
)
from scheduler.domain.fleet import PoolKind
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.lending_policy import Blackout

TRAINING = "{name: training, kind: training, nodes: 2, gpus_per_node: 8, gpu: a100-80g}"
INFERENCE = (
    "{name: inference, kind: inference, nodes: 12, gpus_per_node: 4, gpu: l40s, peak_gpus: 40,"
    " lending: {quantile: 0.99, return_deadline_s: 5m, blackouts: [{start_s: 3600, end_s: 7200}]}}"
)

PARTIAL = "{name: chat, kind: inference, nodes: 3, gpus_per_node: 8, gpu: t4, lendable_gpus: 3, partial_nodes: 2}"


def read(tmp_path: Path, text: str) -> ClusterDocument:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_complete_file_becomes_pools_and_nodes(tmp_path: Path) -> None:
    cluster = read(tmp_path, f"pools: [{TRAINING}, {INFERENCE}]\nelastic: {{from_gpus: 2}}\n")
    training, inference = build_pools(cluster)
    assert (training.kind, training.lending.enabled) == (PoolKind.TRAINING, False)
    assert (inference.lending.quantile, inference.lending.return_deadline_s) == (0.99, 300.0)
    assert inference.lending.blackouts == (Blackout(3600.0, 7200.0),)
    nodes = build_nodes(cluster, {"a100-80g": 80, "l40s": 48}.__getitem__)
    assert [node.name for node in nodes][:3] == ["training-0", "training-1", "inference-00"]
    assert (nodes[-1].name, nodes[-1].pool, nodes[-1].gpus) == ("inference-11", "inference", 4)
    assert nodes[-1].gpu_memory_bytes == 48


def test_last_nodes_of_a_pool_can_lend_parts(tmp_path: Path) -> None:
    document = read(tmp_path, f"pools: [{TRAINING}, {PARTIAL}]")
    nodes = build_nodes(document, lambda gpu: 16 * 2**30)
    assert {node.name: node.lendable_gpus for node in nodes if node.pool == "chat"} == {
        "chat-0": (),
        "chat-1": (5, 6, 7),
        "chat-2": (5, 6, 7),
    }


def test_omitted_fields_have_defaults(tmp_path: Path) -> None:
    cluster = read(tmp_path, f"pools: [{TRAINING}]")
    assert cluster.elastic is None
    assert cluster.reconfiguration_s == {"default": 30.0}
    assert (cluster.checkpoint_interval_s, cluster.lending_period_s) == (900.0, 300.0)


def test_reconfiguration_time_can_be_set_by_model(tmp_path: Path) -> None:
    cluster = read(tmp_path, f"pools: [{TRAINING}]\nreconfiguration_s: {{default: 30, bert: 2m}}\n")
    assert cluster.reconfiguration_s == {"default": 30.0, "bert": 120.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pools: [", "is not YAML"),
        ("[]", "document: got"),
        ("pools: []", "pools: got"),
        (f"pools: [{INFERENCE}]", "pools: got"),
        (
            "pools: [{name: Bad_Name, kind: training, nodes: 1, gpu: t4}]",
            r"pools\.0\.name: got \"Bad_Name\"; allowed: 1 to",
        ),
        (f"pools: [{TRAINING}, {TRAINING}]", r"pools\.1\.name: got \"training\".*no other pool"),
        (f"pools: [{TRAINING.replace('nodes: 2', 'nodes: 0')}]", r"pools\.0\.nodes: got 0"),
        (
            f"pools: [{TRAINING.replace('kind: training', 'kind: batch')}]",
            r"pools\.0\.kind: got .batch.",
        ),
        (f"pools: [{TRAINING.replace('nodes: 2', 'nodes: 2, lending: {}')}]", r"pools\.0\.lending: got"),
        (f"pools: [{TRAINING.replace('nodes: 2', 'nodes: 2, peak_gpus: 3')}]", r"pools\.0\.peak_gpus: got 3"),
        (f"pools: [{TRAINING.replace('nodes: 2', 'nodes: 2, demand: fn0')}]", r"pools\.0\.demand: got .*fn0"),
        (f"pools: [{TRAINING.replace('nodes: 2', 'nodes: 2, lendable_gpus: 1')}]", r"pools\.0\.lendable_gpus: got"),
        (f"pools: [{TRAINING}, {PARTIAL.replace('lendable_gpus: 3', 'lendable_gpus: 8')}]", r"lendable_gpus: got 8"),
        (f"pools: [{TRAINING}, {PARTIAL.replace('partial_nodes: 2', 'partial_nodes: 5')}]", r"partial_nodes: got 5"),
        (f"pools: [{TRAINING}, {PARTIAL.replace('lendable_gpus: 3,', '')}]", r"partial_nodes: got 2"),
        (f"pools: [{TRAINING}]\nspeed: 3", "speed: there is no such field"),
        (f"pools: [{TRAINING}]\nreconfiguration_s: {{bert: 3}}", "reconfiguration_s: got .*'default'"),
        (f"pools: [{TRAINING}]\nreconfiguration_s: .nan", r"reconfiguration_s\.default: got \"nan\""),
        (f"pools: [{TRAINING}]\ncheckpoint_interval_s: 0", "checkpoint_interval_s: got 0"),
        (f"pools: [{TRAINING}]\nqueues: [{{name: a}}, {{name: a}}]", r"queues\.1\.name: got .a."),
        (
            f"pools: [{TRAINING}]\nqueues: [{{name: a, guaranteed_gpus: 2, limit_gpus: 1}}]",
            r"queues\.0\.limit_gpus: got 1",
        ),
        (f"pools: [{TRAINING}]\nelastic: {{min_ratio: 1.5}}", r"elastic\.min_ratio: got 1.5"),
    ],
)
def test_invalid_file_is_rejected_with_field_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        read(tmp_path, text)
    assert re.search(r"cluster\.yaml( line \d)?: ", str(caught.value))


def test_error_names_the_line_of_the_field(tmp_path: Path) -> None:
    again = f"pools:\n  - {TRAINING}\n  - {INFERENCE}\n\n  - {{name: training,\n     kind: training, gpu: t4}}\n"
    with pytest.raises(ClusterError, match=r"cluster\.yaml line 5: pools\.2\.nodes: got nothing"):
        read(tmp_path, again)
    twice = again.replace("gpu: t4", "gpu: t4, nodes: 1, gpus_per_node: 1")
    with pytest.raises(ClusterError, match=r"cluster\.yaml line 5: pools\.2\.name: got \"training\""):
        read(tmp_path, twice)
    with pytest.raises(ClusterError, match=r"cluster\.yaml line 6: pools\.2\.kind: got \"batch\""):
        read(tmp_path, twice.replace("kind: training, gpu: t4", "kind: batch, gpu: t4"))


def test_queues_have_the_names_of_the_trace(tmp_path: Path) -> None:
    queues = "queues: [{name: vc_7f, guaranteed_gpus: 8, limit_gpus: 12}, {name: rest, weight: 0.5}]"
    cluster = read(tmp_path, f"pools: [{TRAINING}]\n{queues}\n")
    assert build_queues(cluster) == (JobQueue("vc_7f", 8, 12), JobQueue("rest", weight=0.5))
    assert build_queues(read(tmp_path, f"pools: [{TRAINING}]")) == ()


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"missing\.yaml: cannot be read"):
        read_cluster(tmp_path / "missing.yaml")
