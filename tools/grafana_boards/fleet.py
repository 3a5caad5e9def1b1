"""Board: GPUs, nodes and loans."""

from scheduler.telemetry.fleet_gauges import NODE_STATES
from tools.grafana_boards.panels import (
    BAD,
    FAIR,
    NEUTRAL,
    UNJUDGED,
    Board,
    Kind,
    Panel,
    Row,
    at_most,
    buckets,
    hourly,
    latest,
    quantiles,
    stat,
)

_COLOURS = {
    "up": "transparent",
    "offered": "super-light-blue",
    "active": NEUTRAL,
    "recalled": FAIR,
    "cordoned": "light-yellow",
    "draining": "dark-yellow",
    "quarantined": "purple",
    "down": BAD,
}
_STATES = {at: ("lent" if name == "active" else name, _COLOURS[name]) for at, name in enumerate(NODE_STATES)}
_LAST_LOAN_STATE = NODE_STATES.index("recalled")


def _node_states(condition: str) -> dict[str, str]:
    """Return the states of the nodes that met a condition at some time of the range."""
    return {
        "{{node}}": "max by (node) (ebbtide_node_state{@pool})"
        f" and on (node) max by (node) (max_over_time((ebbtide_node_state{{@pool}} {condition})[$__range:5m]))"
    }


FLEET = Board(
    "fleet-and-loans",
    "Fleet and loans",
    "GPUs and nodes of the chosen pools, and their loans from inference to training.",
    (
        Row(
            "Now",
            (
                stat(
                    "GPUs",
                    "sum(max by (pool, state) (ebbtide_gpus{@pool}))",
                    about="All GPUs of the chosen pools, up or not.",
                    thresholds=UNJUDGED,
                ),
                stat(
                    "GPUs down",
                    'sum(max by (pool) (ebbtide_gpus{@pool, state="down"}))',
                    about="GPUs on nodes that do not report. Their jobs have moved.",
                    thresholds=at_most(1, 16),
                ),
                stat(
                    "GPUs on loan",
                    "sum(max by (pool) (ebbtide_lent_gpus{@pool}))",
                    about="GPUs of inference nodes that training uses or may use.",
                    thresholds=UNJUDGED,
                    page="#/loans",
                ),
                stat(
                    "Nodes being recalled",
                    'max(ebbtide_loans{@, state="recalled"})',
                    about="Nodes that have to be home by a deadline.",
                    thresholds=UNJUDGED,
                    page="#/loans",
                ),
                stat(
                    "GPU-hours lent, last day",
                    'sum(increase(ebbtide_capacity_gpu_seconds_total{@pool, use="lent_used"}[1d])) / 3600',
                    about="GPU-hours that jobs held on lent nodes.",
                    thresholds=UNJUDGED,
                ),
                stat(
                    "Silent machines",
                    'max(ebbtide_machines{@, state="silent"})',
                    about="Machines whose agents have not reported for so long that their ranks have ended.",
                    thresholds=at_most(1, 2),
                    empty="The simulated fleet has nodes without machines.",
                ),
            ),
        ),
        Row(
            "Loans",
            (
                Panel(
                    Kind.STATES,
                    "Loans by node",
                    "Nodes that were offered, lent or recalled in the range.",
                    _node_states(f"> 0 <= {_LAST_LOAN_STATE}"),
                    width=24,
                    states=_STATES,
                    page="#/loans",
                ),
                Panel(
                    Kind.HEATMAP,
                    "Time from recall to return",
                    "Number of nodes by the time from the decision to recall them until their return.",
                    buckets("ebbtide_recall_duration_seconds"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Time from recall to return, quantiles",
                    "Half of the nodes, and 95 of 100, were home within this time.",
                    quantiles("ebbtide_recall_duration_seconds"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Recalls per hour by outcome",
                    "in_time, late, cancelled, or lost: the node went down.",
                    hourly("ebbtide_recalls_total{@pool}", "pool, outcome"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Prefetches per hour",
                    "Images and weights loaded onto nodes before a loan or a return, by purpose and outcome.",
                    hourly("ebbtide_prefetch_duration_seconds_count{@}", "purpose, outcome"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Lending decisions per hour",
                    "Decisions of ticks that were committed.",
                    hourly('ebbtide_decisions_total{@, kind=~"LendNode|RecallNode|CancelRecall|ReturnNode"}', "kind"),
                    stacked=True,
                ),
                Panel(
                    Kind.BARS,
                    "GPU-hours of lent nodes, last day",
                    "Held by jobs, or idle. Idle loans are returned when inference needs them, or when no job does.",
                    {
                        "{{pool}}, {{use}}": "sum by (pool, use) (increase(ebbtide_capacity_gpu_seconds_total"
                        '{@pool, use=~"lent_.*"}[1d])) / 3600'
                    },
                    "h",
                    thresholds=UNJUDGED,
                ),
                Panel(
                    Kind.GRAPH,
                    "Loans by state",
                    "Nodes whose loan is proposed, offered, in effect, or recalled.",
                    latest("ebbtide_loans{@}", "state"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Pools with lending enabled",
                    "1: the pool may lend and lending is not paused. See `ebbtide lending`.",
                    latest("ebbtide_lending_enabled{@pool}", "pool"),
                ),
            ),
        ),
        Row(
            "Nodes and GPUs",
            (
                Panel(
                    Kind.STATES,
                    "Nodes out of service",
                    "Nodes that were cordoned, drained, quarantined or down in the range.",
                    _node_states(f"> {_LAST_LOAN_STATE}"),
                    width=24,
                    states=_STATES,
                ),
                Panel(
                    Kind.GRAPH,
                    "GPUs by use",
                    "Mean of 15 minutes. The uses of a pool add up to its GPUs.",
                    {
                        "{{pool}}, {{use}}": "sum by (pool, use) "
                        "(rate(ebbtide_capacity_gpu_seconds_total{@pool}[15m])) > 0"
                    },
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Nodes by state",
                    "Up, out of service, or the state of their loan.",
                    latest("ebbtide_nodes{@pool}", "pool, state"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Machines by state of their agent",
                    "Silent: no report for so long that the ranks have ended. Kubernetes pods are not machines.",
                    latest("ebbtide_machines{@}", "state"),
                    stacked=True,
                    empty="The simulated fleet has nodes without machines.",
                ),
                Panel(
                    Kind.GRAPH,
                    "Allocated GPUs by use",
                    "running: training. moving: starting, resizing or leaving.",
                    {"{{use}}": "sum by (use) (rate(ebbtide_gpu_seconds_total{@}[15m]))"},
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Goodput, last 24 hours",
                    "Useful GPU-seconds divided by allocated GPU-seconds. Unknown until the first job has run.",
                    latest("ebbtide_goodput_ratio{@}", legend="useful"),
                    "percentunit",
                ),
                Panel(
                    Kind.GRAPH,
                    "Lost GPU-hours per hour",
                    "Work since the last checkpoint, by cause and by owner of the GPUs.",
                    {
                        "{{cause}}, {{gpus}}": "sum by (cause, gpus) "
                        "(increase(ebbtide_lost_gpu_seconds_total{@}[1h])) / 3600 > 0"
                    },
                    "h",
                    stacked=True,
                ),
            ),
        ),
    ),
)
