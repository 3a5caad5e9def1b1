"""Dashboard panels of the operator, with a real Prometheus, operator and API server."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.contract.prometheus_site import PROGRAM, Prometheus
from tests.kubernetes.control_plane import ControlPlane
from tests.kubernetes.fault_proxy import Fault, FaultProxy
from tests.kubernetes.operated import Operated
from tests.kubernetes.waiting import eventually
from tests.loopback import find_free_port
from tests.monitoring.dashboard_queries import interpolate
from tools.grafana_boards.panels import Panel, select
from tools.grafana_boards.service import KUBERNETES_PANELS

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Prometheus: Debian's package prometheus has it")


def test_every_kubernetes_panel_has_data(
    operated: Operated, control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = tmp_path / "counts", f"127.0.0.1:{find_free_port()}"
    folder.mkdir()
    exporter = [sys.executable, "-m", "scheduler.telemetry.exporter", "--folder", str(folder)]
    with subprocess.Popen([*exporter, "--port", address.partition(":")[2]]) as serving:
        prometheus = Prometheus(tmp_path, address, every="1s")
        prometheus.start()
        try:
            monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
            operated.add_nodes(1)
            with FaultProxy(control_plane).running() as proxy:
                proxy.fault = lambda method, path: Fault(500) if method == "POST" and "/pods" in path else Fault()
                operated.start_operator(proxy.kubeconfig(tmp_path))
                operated.submit("llama", 8, 8)
                for panel in KUBERNETES_PANELS:
                    eventually(partial(_shows_all, prometheus, panel), what=panel.title)
                proxy.fault = lambda method, path: Fault()
                operated.until_phase("llama", "Running")
        finally:
            prometheus.kill()
            serving.send_signal(signal.SIGTERM)


def _shows_all(prometheus: Prometheus, panel: Panel) -> bool:
    found = [prometheus.ask("query", query=interpolate(select(query)))["result"] for query in panel.queries.values()]
    return all(any(_is_something(series) for series in result) for result in found)


def _is_something(series: dict[str, Any]) -> bool:
    value = float(series["value"][1])
    return math.isfinite(value) and value != 0.0
