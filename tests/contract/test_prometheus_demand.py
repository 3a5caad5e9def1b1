"""Demand from a real Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.demand.presets import PrometheusQuery, PromqlTerm
from scheduler.demand.prometheus_poller import PrometheusPoller
from scheduler.domain.demand_source import KnownDemand, PoolDemand, UnknownDemand, UnknownDemandReason
from tests.contract.prometheus_site import PROGRAM, Prometheus, Target
from tests.kubernetes.waiting import eventually

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no prometheus on the path (Debian's package prometheus)")

GAUGES = """
inference_gpus 12
served_gpus{model="chat"} 3
served_gpus{model="draw"} 4
"""


class Rig:
    def __init__(self, folder: Path) -> None:
        self.target = Target()
        self.target.text = GAUGES
        self.prometheus = Prometheus(folder, self.target.address)
        self.watch = PrometheusPoller(self.prometheus.url, on_change=lambda: None, interval_s=0.1)

    def close(self) -> None:
        self.watch.stop()
        self.prometheus.kill()
        self.target.close()

    def known(self, text: str, stale_after_s: float = 300.0) -> PoolDemand:
        return self.known_sum((PromqlTerm(text),), stale_after_s)

    def known_sum(self, terms: tuple[PromqlTerm, ...], stale_after_s: float = 300.0) -> PoolDemand:
        query = PrometheusQuery(terms, stale_after_s)
        self.watch.set_queries({query: time.time()})
        return self.watch.get_demand(query, time.time())

    def until_gpus(self, gpus: float, text: str, stale_after_s: float = 300.0) -> KnownDemand:
        def asked() -> KnownDemand | None:
            known = self.known(text, stale_after_s)
            return known if isinstance(known, KnownDemand) and known.gpus == gpus else None

        found = eventually(asked, what=f"{gpus} GPUs by {text}")
        assert found is not None
        return found

    def until_gap(self, gap: UnknownDemandReason, text: str, stale_after_s: float = 300.0) -> str:
        def asked() -> UnknownDemand | None:
            known = self.known(text, stale_after_s)
            return known if isinstance(known, UnknownDemand) and known.reason is gap else None

        found = eventually(asked, what=f"{gap} by {text}")
        assert found is not None
        return found.message


@pytest.fixture(scope="module")
def started_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("prometheus"))
    try:
        made.prometheus.start()
        made.watch.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def rig(started_rig: Rig) -> Rig:
    started_rig.target.text = GAUGES
    started_rig.until_gpus(12.0, "inference_gpus")
    return started_rig


def test_only_one_series_or_a_scalar_is_accepted(rig: Rig) -> None:
    found = rig.until_gpus(12.0, "inference_gpus # of the chat's pool")
    assert 0.0 <= time.time() - found.at_s < 60.0
    rig.until_gpus(7.0, "sum(served_gpus)")
    rig.until_gpus(12.0, "scalar(inference_gpus)")
    rig.target.text = "inference_gpus 15\n"
    rig.until_gpus(15.0, "inference_gpus")


def test_other_results_have_a_reason(rig: Rig) -> None:
    assert "2 series" in rig.until_gap(UnknownDemandReason.MANY_SERIES, "served_gpus")
    rig.until_gap(UnknownDemandReason.NO_SERIES, "no_such_gpus")
    assert "parse error" in rig.until_gap(UnknownDemandReason.BAD_QUERY, "sum(")
    assert "a matrix" in rig.until_gap(UnknownDemandReason.BAD_QUERY, "inference_gpus[5m]")
    assert "many-to-many" in rig.until_gap(UnknownDemandReason.BAD_QUERY, "served_gpus * on() served_gpus")
    assert "nan" in rig.until_gap(UnknownDemandReason.NOT_A_NUMBER, "scalar(no_such_gpus)")
    assert "-12" in rig.until_gap(UnknownDemandReason.NOT_A_NUMBER, "-inference_gpus")


def test_failed_scrapes_make_the_sample_stale(rig: Rig) -> None:
    rig.target.text = "no metrics page"
    assert "no series since" in rig.until_gap(UnknownDemandReason.STALE, "inference_gpus")


def test_reading_has_the_age_of_its_sample(rig: Rig) -> None:
    sampled_at_s = int(time.time()) - 60
    rig.target.text = f"inference_gpus 5 {1000 * sampled_at_s}\nold_gpus 5 {1000 * sampled_at_s}\n"
    assert rig.until_gpus(5.0, "old_gpus", stale_after_s=600.0).at_s == sampled_at_s
    rig.until_gap(UnknownDemandReason.STALE, "old_gpus", stale_after_s=59.0)


def test_prometheus_outage_and_recovery(rig: Rig) -> None:
    rig.prometheus.kill()
    assert rig.prometheus.url in rig.until_gap(UnknownDemandReason.UNREACHABLE, "inference_gpus")
    rig.prometheus.start()
    rig.until_gpus(12.0, "inference_gpus")
