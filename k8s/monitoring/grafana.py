"""Panels as Grafana's dashboards, by its own library."""

import itertools
import json
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as words
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)

from k8s.monitoring.panels import Board, Panel

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH = 24
_IN_ROW = {"number": 4, "lines": 3, "states": 3}  # of panels
_HEIGHT = {"number": 4, "lines": 7, "states": 7}
_ALL = VariableOption(selected=True, text="All", value="$__all")


def _thresholds(bounds: tuple[float, float]) -> dashboard.ThresholdsConfig:
    yellow, red = bounds
    steps = [Threshold(color="green"), Threshold(value=yellow, color="yellow")]
    steps.append(Threshold(value=red, color="red"))
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _builder(panel: Panel) -> Any:
    """Return a builder of what is peculiar to a kind."""
    if panel.kind == "number":
        number = stat.Panel().graph_mode(words.BigValueGraphMode.AREA)
        return number.thresholds(_thresholds(panel.bounds or (1, 1)))
    if panel.kind == "states":
        return statetimeline.Panel().show_value(words.VisibilityMode.NEVER)
    legend = common.VizLegendOptions().display_mode(words.LegendDisplayMode.LIST)
    legend.placement(words.LegendPlacement.BOTTOM).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(words.TooltipDisplayMode.MULTI)
    lines = timeseries.Panel().legend(legend).tooltip(tooltip).fill_opacity(10)
    return lines.min(0) if panel.unit != "none" else lines


def _panel(panel: Panel) -> Any:
    made = _builder(panel).title(panel.title).description(panel.about).unit(panel.unit)
    made.datasource(_SOURCE).height(_HEIGHT[panel.kind]).span(_WIDTH // _IN_ROW[panel.kind])
    for at, (expression, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend)
        made.with_target(query.ref_id(chr(ord("A") + at)))
    return made


def dashboard_json(board: Board) -> str:
    """Return a dashboard as Grafana imports it."""
    made = dashboard.Dashboard(board.title).uid(board.uid).tags(["embertide"]).readonly()
    made.refresh("10s").time("now-1h", "now").timezone("utc").tooltip(DashboardCursorSync.CROSSHAIR)
    made.with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    for name, query in board.choices:
        choice = dashboard.QueryVariable(name).query(query).datasource(_SOURCE).current(_ALL)
        choice.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        made.with_variable(choice.multi(True).include_all(True).all_value(".*"))
    link = dashboard.DashboardLink("Embertide").tags(["embertide"]).as_dropdown(True)
    made.link(link.include_vars(True).keep_time(True))
    numbers = itertools.count(1)
    for title, panels in board.rows:
        made.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            made.with_panel(_panel(panel).id(next(numbers)))
    return json.dumps(made.build(), cls=JSONEncoder, sort_keys=True, indent=1) + "\n"
