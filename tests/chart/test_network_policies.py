"""Whom the API's pods may speak to, by the NetworkPolicy that the chart renders."""

from __future__ import annotations

from tests.chart import manifests
from tests.chart.manifests import named, read


def test_the_api_goes_out_to_names_and_the_database_and_to_whom_values_name() -> None:
    ways = {
        name: named(read(name), "NetworkPolicy", "ebbtide-api")["spec"]["egress"]
        for name in ("postgresql", "everything")
    }
    names, database = ways["postgresql"]
    assert {port["port"] for port in names["ports"]} == {53, 5353}
    assert database == {"ports": [{"port": 5432, "protocol": "TCP"}]}
    assert ways["everything"][2:] == [
        {"ports": [{"port": 443, "protocol": "TCP"}], "to": [manifests.PEER]},
        {"ports": [{"port": 4318, "protocol": "TCP"}], "to": [manifests.PEER]},
        {
            "ports": [{"port": 443, "protocol": "TCP"}, {"port": 8443, "protocol": "TCP"}],
            "to": [manifests.ANYWHERE, manifests.PEER],
        },
    ]
