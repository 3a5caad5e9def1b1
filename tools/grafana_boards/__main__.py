"""Write the dashboards of the chart."""

from tools.grafana_boards.render import write_dashboards

write_dashboards()
