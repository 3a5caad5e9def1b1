"""Generate helm/ebbtide/dashboards: run `python -m tests.chart.dashboards`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.common import StackingConfig
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, GridPos

from tests.chart.boards import BOARDS, Board, Graph

FOLDER = Path(__file__).parents[2] / "helm" / "ebbtide" / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH, _HEIGHT = 12, 8


def render_dashboards() -> Iterator[tuple[str, str]]:
    """Yield the file name and content of each dashboard."""
    for board in BOARDS:
        yield f"{board.name}.json", JSONEncoder(sort_keys=True, indent=2).encode(_build_dashboard(board).build()) + "\n"


def _build_dashboard(board: Board) -> Dashboard:
    dashboard = (
        Dashboard(f"Ebbtide: {board.title}")
        .uid(f"ebbtide-{board.name}")
        .tags(["ebbtide"])
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    bottom = 0
    for title, graphs in {"": board.graphs, **board.rows}.items():
        if title:
            dashboard.with_row(Row(title).id(100 + bottom).grid_pos(GridPos(h=1, w=2 * _WIDTH, x=0, y=bottom)))
            bottom += 1
        for at, graph in enumerate(graphs):
            place = GridPos(h=_HEIGHT, w=_WIDTH, x=at % 2 * _WIDTH, y=bottom + at // 2 * _HEIGHT)
            dashboard.with_panel(_build_panel(graph).id(1 + bottom + at).grid_pos(place))
        bottom += -(-len(graphs) // 2) * _HEIGHT
    return dashboard


def _build_panel(graph: Graph) -> timeseries.Panel:
    panel = timeseries.Panel().title(graph.title).unit(graph.unit).datasource(_SOURCE).fill_opacity(10)
    panel.no_value("no data")
    if graph.about:
        panel.description(graph.about)
    if graph.stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)
    for name, (legend, query) in zip(ascii_uppercase, graph.queries.items(), strict=False):
        panel.with_target(Dataquery().ref_id(name).expr(query).legend_format(legend))
    return panel


def main() -> None:
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, text in render_dashboards():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
