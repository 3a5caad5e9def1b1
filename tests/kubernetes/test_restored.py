"""An empty or restored database, while the cluster carries later epochs."""

from __future__ import annotations

from scheduler.kubernetes.api_objects import ELASTIC_JOB, EPOCH_ANNOTATION, LOAN_LABEL, LOANED_TAINT, NODE, labels_of
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually


def test_operator_with_empty_database_adopts_the_cluster(operated: Operated) -> None:
    operated.add_nodes(1)
    lent = operated.kubelet.add_node(f"{operated.namespace}-lent", gpus=8)["metadata"]["name"]
    metadata = {"labels": {LOAN_LABEL: "i0-77"}, "annotations": {EPOCH_ANNOTATION: "12"}}
    operated.cluster.patch(NODE, lent, change={"metadata": metadata, "spec": {"taints": [LOANED_TAINT]}})
    spec = {"gpus": {"min": 4, "max": 4}, "steps": 10**9, "command": ["python", "train.py"]}
    meta = {"name": "llama", "namespace": operated.namespace, "annotations": {EPOCH_ANNOTATION: "900"}}
    operated.cluster.create(ELASTIC_JOB, {"metadata": meta, "spec": spec})
    operated.start_operator()
    operated.until_phase("llama", "Running")
    eventually(lambda: lent not in operated.lent_nodes(), what="a node that was lent for a loan nobody knows is home")
    assert LOAN_LABEL not in labels_of(operated.cluster.get(NODE, lent))
    operated.cluster.delete(ELASTIC_JOB, "llama", operated.namespace)
    eventually(lambda: operated.find("llama") is None, what="it can be deleted")
