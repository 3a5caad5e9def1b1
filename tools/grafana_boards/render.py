"""Grafana's JSON of the boards, built with Grafana's own types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    FieldColorModeId,
    GridPos,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tools.grafana_boards.boards import BOARDS
from tools.grafana_boards.panels import LOWEST, Board, Kind, Panel, Thresholds, select

FOLDER = Path(__file__).parents[2] / "helm" / "ebbtide" / "dashboards"
CONSOLE_URL = "http://localhost:8787"
"""Address of the console in links. The chart replaces it."""
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS = 24
_HEIGHTS = {Kind.STAT: 4, Kind.GRAPH: 8, Kind.HEATMAP: 8, Kind.STATES: 7, Kind.BARS: 8}

AnyPanel = stat.Panel | timeseries.Panel | heatmap.Panel | statetimeline.Panel | bargauge.Panel


def render_dashboards() -> Iterator[tuple[str, str]]:
    """Yield the file name and content of each dashboard."""
    for board in BOARDS:
        built = _build_dashboard(board).build()
        yield f"{board.name}.json", JSONEncoder(sort_keys=True, indent=2).encode(built) + "\n"


def write_dashboards() -> None:
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, text in render_dashboards():
        (FOLDER / name).write_text(text, encoding="utf-8")


def _build_dashboard(board: Board) -> dashboard.Dashboard:
    built = (
        dashboard.Dashboard(f"Ebbtide: {board.title}")
        .uid(f"ebbtide-{board.name}")
        .description(board.about)
        .tags(["ebbtide"])
        .refresh("1m")
        .time("now-24h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .links([_link_boards(), _link_console("Console", "#/"), _link_console("Runbook", "docs/runbook")])
        .annotations(list(_build_annotations()))
    )
    for variable in _build_variables():
        built.with_variable(variable)
    bottom, number = 0, 1
    for row in board.rows:
        built.with_row(dashboard.Row(row.title).id(number).grid_pos(GridPos(h=1, w=_COLUMNS, x=0, y=bottom)))
        bottom, number, left, height = bottom + 1, number + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                bottom, left, height = bottom + height, 0, 0
            place = GridPos(h=_HEIGHTS[panel.kind], w=panel.width, x=left, y=bottom)
            built.with_panel(_build_panel(panel).id(number).grid_pos(place))
            number, left, height = number + 1, left + panel.width, max(height, place.h)
        bottom += height
    return built


def _build_variables() -> Iterator[dashboard.DatasourceVariable | dashboard.QueryVariable | dashboard.ConstantVariable]:
    """Yield the variables. One installation is chosen; one without the labels has the empty value, which matches."""
    yield dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    info = "ebbtide_build_info"
    yield _query_variable("cluster", f"label_values({info}, cluster)")
    yield _query_variable("namespace", f'label_values({info}{{cluster="$cluster"}}, namespace)')
    for name, gauge in (("pool", "ebbtide_gpus"), ("queue", "ebbtide_queue_allocated_gpus")):
        variable = _query_variable(name, f"label_values({select(f'{gauge}{{@}}')}, {name})")
        yield variable.multi(True).include_all(True).all_value(".*")
    yield dashboard.ConstantVariable("console").value(CONSOLE_URL)


def _query_variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .query(query)
        .datasource(_SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _build_annotations() -> Iterator[dashboard.AnnotationQuery]:
    recalls = 'sum by (kind) (increase(ebbtide_decisions_total{@, kind="RecallNode"}[$__interval])) > 0'
    running = "max by (version) (ebbtide_build_info{@})"
    deploys = f"{running} unless max by (version) (ebbtide_build_info{{@}} offset 10m)"
    for name, query, color in (("Recalls", recalls, "orange"), ("Deploys", deploys, "blue")):
        yield (
            dashboard.AnnotationQuery()
            .name(name)
            .datasource(_SOURCE)
            .enable(True)
            .icon_color(color)
            .expr(select(query))
        )


def _link_boards() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Ebbtide").type(DashboardLinkType.DASHBOARDS).tags(["ebbtide"])
    return link.as_dropdown(True).include_vars(True).keep_time(True)


def _link_console(title: str, page: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(f"${{console}}/{page}").target_blank(True)


def _build_panel(panel: Panel) -> AnyPanel:
    built = _BUILDERS[panel.kind](panel)
    built.title(panel.title).description(panel.about).datasource(_SOURCE).unit(panel.unit).no_value("no data")
    if panel.thresholds:
        built.thresholds(_build_thresholds(panel.thresholds))
    if panel.states:
        built.mappings([_map_states(panel.states)])
    if panel.page:
        built.data_links([_link_console("Open in the console", panel.page)])
    for name, (legend, query) in zip(ascii_uppercase, panel.queries.items(), strict=False):
        target = Dataquery().ref_id(name).expr(select(query)).legend_format(legend)
        if panel.kind is Kind.HEATMAP:
            target.format(PromQueryFormat.HEATMAP)
        if panel.kind is Kind.BARS:
            target.instant()
        if panel.kind is Kind.GRAPH and "histogram_quantile" in query:
            target.exemplar(True)
        built.with_target(target)
    return built


def _build_stat(panel: Panel) -> stat.Panel:
    built = stat.Panel().graph_mode(BigValueGraphMode.AREA).color_mode(BigValueColorMode.VALUE)
    built.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS)).reduce_options(_reduce_to_last())
    return built.text_mode(BigValueTextMode.NAME) if panel.title == "Version" else built


def _build_graph(panel: Panel) -> timeseries.Panel:
    built = timeseries.Panel().fill_opacity(8).line_width(1).show_points(VisibilityMode.NEVER)
    built.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    built.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.TABLE)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    if panel.stacked:
        built.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(45).line_width(0)
    if panel.thresholds:
        built.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    return built


def _build_heatmap(panel: Panel) -> heatmap.Panel:
    colors = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(32)
    axis = heatmap.YAxisConfig().unit(panel.unit)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(colors)
        .y_axis(axis)
        .cell_gap(1)
        .filter_values(heatmap.FilterValueRange().le(1e-9))
    )


def _build_states(panel: Panel) -> statetimeline.Panel:
    built = statetimeline.Panel().merge_values(True).fill_opacity(80).row_height(0.8).show_value(VisibilityMode.NEVER)
    built.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color("text"))
    return built.per_page(25)


def _build_bars(panel: Panel) -> bargauge.Panel:
    built = bargauge.Panel().display_mode(BarGaugeDisplayMode.BASIC).orientation(VizOrientation.HORIZONTAL)
    built.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS)).reduce_options(_reduce_to_last())
    built.min(0)
    return built if panel.maximum is None else built.max(panel.maximum)


_BUILDERS: Mapping[Kind, Callable[[Panel], AnyPanel]] = {
    Kind.STAT: _build_stat,
    Kind.GRAPH: _build_graph,
    Kind.HEATMAP: _build_heatmap,
    Kind.STATES: _build_states,
    Kind.BARS: _build_bars,
}


def _reduce_to_last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _build_thresholds(thresholds: Thresholds) -> dashboard.ThresholdsConfig:
    steps = [Threshold(value=None if value == LOWEST else value, color=color) for value, color in thresholds]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _map_states(states: Mapping[int, tuple[str, str]]) -> ValueMap:
    return ValueMap(
        {str(value): ValueMappingResult(text=text, color=color, index=value) for value, (text, color) in states.items()}
    )
