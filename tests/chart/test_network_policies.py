"""Egress of the API pods in the rendered NetworkPolicy."""

from __future__ import annotations

from tests.chart import manifests
from tests.chart.manifests import named, read


def test_api_egress_allows_dns_database_and_configured_peers() -> None:
    egress = {
        name: named(read(name), "NetworkPolicy", "ebbtide-api")["spec"]["egress"]
        for name in ("postgresql", "everything")
    }
    names, database = egress["postgresql"]
    assert {port["port"] for port in names["ports"]} == {53, 5353}
    assert database == {"ports": [{"port": 5432, "protocol": "TCP"}]}
    assert egress["everything"][2:] == [
        {"ports": [{"port": 443, "protocol": "TCP"}], "to": [manifests.PEER]},
        {"ports": [{"port": 4318, "protocol": "TCP"}], "to": [manifests.PEER]},
        {
            "ports": [{"port": 443, "protocol": "TCP"}, {"port": 8443, "protocol": "TCP"}],
            "to": [manifests.ANYWHERE, manifests.PEER],
        },
    ]


def test_pods_of_jobs_reach_each_other_on_all_ports() -> None:
    jobs = {"matchExpressions": [{"key": "ebbtide.dev/job", "operator": "Exists"}]}
    for name in ("sqlite", "postgresql"):
        policy = named(read(name), "NetworkPolicy", "ebbtide-jobs")["spec"]
        assert (policy["podSelector"], policy["policyTypes"]) == (jobs, ["Ingress"])
        assert policy["ingress"] == [{"from": [{"podSelector": jobs}]}], "no port is named"
