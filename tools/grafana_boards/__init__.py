"""Grafana dashboards of the chart: run `python -m tools.grafana_boards` to write helm/ebbtide/dashboards."""
