"""Board: ticks, decisions and the solver."""

from tools.grafana_boards.panels import (
    BAD,
    GOOD,
    UNJUDGED,
    Board,
    Kind,
    Panel,
    Row,
    at_least,
    at_most,
    buckets,
    hourly,
    latest,
    quantiles,
    stat,
)

_TICKS = 'ebbtide_tick_duration_seconds_count{@, stage="observe"}'
SCHEDULER = Board(
    "solver-and-scheduler",
    "Solver and scheduler",
    "Whether the controller decides in time, what it decides, and how the solver keeps up.",
    (
        Row(
            "Now",
            (
                stat(
                    "Leader",
                    "max(ebbtide_leader{@})",
                    about="Whether a controller leads.",
                    thresholds=at_least(1, 1),
                    states={0: ("missing", BAD), 1: ("leads", GOOD)},
                ),
                stat(
                    "Mean tick, 10 minutes",
                    f"sum(rate(ebbtide_tick_duration_seconds_sum{{@}}[10m])) / sum(rate({_TICKS}[10m]))",
                    "s",
                    about="All stages of a tick together. Recalls are decided in ticks.",
                    thresholds=at_most(1, 10),
                ),
                stat(
                    "Pending commands, now",
                    "max(ebbtide_inbox_commands{@})",
                    about="Requests of users that the next tick applies.",
                    thresholds=at_most(100, 1000),
                ),
                stat(
                    "Dropped decisions, last day",
                    "sum(increase(ebbtide_violations_total{@}[1d]))",
                    about="Illegal decisions that were dropped. Each is a bug in a policy.",
                    thresholds=at_most(1, 1),
                ),
                stat(
                    "Clock ahead",
                    "max(ebbtide_clock_lead_seconds{@})",
                    "s",
                    about="Seconds by which the stored state is in the future. A clock was wrong.",
                    thresholds=at_most(1, 60),
                ),
                stat(
                    "Version",
                    "max by (version) (ebbtide_build_info{@})",
                    about="Installed release.",
                    thresholds=UNJUDGED,
                ),
            ),
        ),
        Row(
            "Ticks",
            (
                Panel(
                    Kind.HEATMAP,
                    "Duration of stages",
                    "Number of stages of ticks by their duration.",
                    buckets("ebbtide_tick_duration_seconds"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Tick duration by stage, 95th percentile",
                    "`converge` and `observe` depend on executors, `commit` and `load` on the database.",
                    quantiles("ebbtide_tick_duration_seconds", by="stage", window="10m"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Ticks and commits per second",
                    "A tick that changes nothing commits nothing.",
                    {
                        "ticks": f"sum(rate({_TICKS}[10m]))",
                        "commits": 'sum(rate(ebbtide_tick_duration_seconds_count{@, stage="commit"}[10m]))',
                    },
                    "ops",
                ),
                Panel(
                    Kind.GRAPH,
                    "Decisions and dropped decisions per hour",
                    "Dropped decisions violated an invariant.",
                    hourly("ebbtide_decisions_total{@}", "kind")
                    | hourly("ebbtide_violations_total{@}", "law", "dropped: {{law}}"),
                    stacked=True,
                ),
                Panel(
                    Kind.STATES,
                    "Leadership",
                    "Whether a controller led.",
                    latest("ebbtide_leader{@}", legend="leader"),
                    width=24,
                    states={0: ("missing", BAD), 1: ("leads", GOOD)},
                ),
                Panel(
                    Kind.GRAPH,
                    "Pending commands",
                    "Requests of users that the next tick applies.",
                    latest("ebbtide_inbox_commands{@}", legend="commands"),
                ),
                Panel(
                    Kind.GRAPH,
                    "Snapshot generation",
                    "Number of the latest committed state.",
                    latest("ebbtide_snapshot_generation{@}", legend="generation"),
                ),
            ),
        ),
        Row(
            "Solver",
            (
                Panel(
                    Kind.HEATMAP,
                    "Solve duration",
                    "Number of shapes of scaling curves by the time to solve them.",
                    buckets("ebbtide_solve_duration_seconds"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Solve duration, quantiles",
                    "Half of the shapes, and 95 of 100, were solved within this time.",
                    quantiles("ebbtide_solve_duration_seconds", window="6h"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Solves per hour",
                    "Shapes of scaling curves.",
                    {"solved": "sum(increase(ebbtide_solve_duration_seconds_count{@}[1h]))"},
                ),
                Panel(
                    Kind.GRAPH,
                    "Mean optimality gap",
                    "Proven distance of plans to the optimum, as a share of the step time. 0: optimal.",
                    {
                        "gap": "sum(increase(ebbtide_solve_optimality_gap_sum{@}[6h]))"
                        " / sum(increase(ebbtide_solve_optimality_gap_count{@}[6h]))"
                    },
                    "percentunit",
                ),
            ),
        ),
    ),
)
