"""Board: objectives, error budgets, capacity and waste of one installation."""

from tools.grafana_boards.panels import (
    BAD,
    FAIR,
    GOOD,
    LOWEST,
    UNJUDGED,
    Board,
    Kind,
    Panel,
    Row,
    at_least,
    at_most,
    stat,
)

_MET = "100% minus the share of the last 30 days that missed the objective. "
_GPU_USES = "sum by (use) (rate(ebbtide_capacity_gpu_seconds_total{@}[15m]))"
_NO_ALERTS = "Only a Prometheus that evaluates the rules writes ALERTS."


def _error(slo: str, window: str = "30d") -> str:
    return f'ebbtide:slo_error:ratio_rate{window}{{@, slo="{slo}"}}'


_BUDGETS = {
    "recalls in time": ("recalls-in-time", 0.001),
    "inference met, worst pool": ("inference-met", 0.001),
    "goodput": ("goodput", 0.1),
    "queue wait": ("queue-wait", 0.05),
}
OVERVIEW = Board(
    "overview",
    "Overview",
    "Objectives, error budgets, and where the GPU time of this installation goes.",
    (
        Row(
            "Objectives, last 30 days",
            (
                stat(
                    "Recalls home by deadline",
                    f"1 - {_error('recalls-in-time')}",
                    "percentunit",
                    about=_MET + "Objective: 99.9% of the recalled nodes are home by their deadline.",
                    thresholds=at_least(0.999, 0.99),
                    page="#/loans",
                ),
                stat(
                    "Inference met, worst pool",
                    f"1 - max({_error('inference-met')})",
                    "percentunit",
                    about=_MET + "Objective: loans leave inference short in at most 0.1% of five-minute intervals.",
                    thresholds=at_least(0.999, 0.99),
                ),
                stat(
                    "Goodput",
                    f"1 - {_error('goodput')}",
                    "percentunit",
                    about=_MET + "Objective: 90% of the allocated GPU time is useful training.",
                    thresholds=at_least(0.9, 0.8),
                ),
                stat(
                    "Starts within the objective",
                    f"1 - {_error('queue-wait')}",
                    "percentunit",
                    about=_MET + "Objective: 95% of the jobs start within `queueWaitSeconds`, by default an hour.",
                    thresholds=at_least(0.95, 0.9),
                    page="#/jobs",
                ),
                stat(
                    "Alerts that fire",
                    'count(ALERTS{@, alertstate="firing", alertname=~"Ebbtide.*"}) or vector(0)',
                    about="Number of alerts of Ebbtide that fire now. The timeline below names them.",
                    thresholds=at_most(1, 2),
                    empty=_NO_ALERTS,
                ),
                stat(
                    "Leader",
                    "max(ebbtide_leader{@})",
                    about="Whether a controller leads. Without one nothing is lent, recalled or started.",
                    thresholds=at_least(1, 1),
                    states={0: ("missing", BAD), 1: ("leads", GOOD)},
                ),
            ),
        ),
        Row(
            "Error budgets",
            (
                Panel(
                    Kind.BARS,
                    "Error budget left, 30 days",
                    "Share of the errors that 30 days may have and that are left. Below 0 the objective is missed.",
                    {name: f"1 - max({_error(slo)}) / {budget}" for name, (slo, budget) in _BUDGETS.items()},
                    "percentunit",
                    thresholds=((LOWEST, BAD), (0.0, FAIR), (0.25, GOOD)),
                    maximum=1.0,
                ),
                Panel(
                    Kind.GRAPH,
                    "Burn rate, six hours",
                    "Errors in multiples of the error budget. 1 spends the budget in 30 days; 6 alerts.",
                    {name: f"max({_error(slo, '6h')}) / {budget}" for name, (slo, budget) in _BUDGETS.items()},
                    thresholds=((LOWEST, "transparent"), (1.0, FAIR), (6.0, BAD)),
                ),
                Panel(
                    Kind.STATES,
                    "Alerts",
                    "Alerts of Ebbtide while they fire. The runbook of each is linked in the alert.",
                    {"{{alertname}}": 'max by (alertname) (ALERTS{@, alertstate="firing", alertname=~"Ebbtide.*"})'},
                    width=24,
                    states={1: ("fires", BAD)},
                    empty=_NO_ALERTS,
                ),
            ),
        ),
        Row(
            "GPU time",
            (
                stat(
                    "GPUs",
                    "sum(max by (pool, state) (ebbtide_gpus{@}))",
                    about="All GPUs of all pools, up or not.",
                    thresholds=UNJUDGED,
                    width=6,
                ),
                stat(
                    "GPUs that hold jobs",
                    'sum(max by (pool) (ebbtide_gpus{@, state="training"}))',
                    about="GPUs that jobs hold now, on own and lent nodes.",
                    thresholds=UNJUDGED,
                    width=6,
                ),
                stat(
                    "GPUs idle while jobs wait",
                    "sum(rate(ebbtide_idle_while_waiting_gpu_seconds_total{@}[30m]))",
                    about="Mean of 30 minutes: unused own and lent GPUs whose model a pending job accepts.",
                    thresholds=at_most(8, 32),
                    width=6,
                    page="#/jobs",
                ),
                stat(
                    "GPU-hours lost, last day",
                    "sum(increase(ebbtide_lost_gpu_seconds_total{@}[1d])) / 3600",
                    about="Work since the last checkpoint of runs that ended unexpectedly.",
                    thresholds=at_most(24, 96),
                    width=6,
                ),
                Panel(
                    Kind.GRAPH,
                    "GPUs by use",
                    "Mean of 15 minutes, all pools. The uses add up to all GPUs. `free` of inference pools is reserve.",
                    {"{{use}}": _GPU_USES},
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Waste",
                    "Mean number of GPUs without useful work: idle while a job waits, moving between plans, or lost.",
                    {
                        "idle while jobs wait, {{gpus}}": "sum by (gpus) "
                        "(rate(ebbtide_idle_while_waiting_gpu_seconds_total{@}[1h]))",
                        "starts and resizes": 'sum(rate(ebbtide_gpu_seconds_total{@, use="moving"}[1h]))',
                        "lost work, {{gpus}}": "sum by (gpus) (rate(ebbtide_lost_gpu_seconds_total{@}[1h]))",
                    },
                    stacked=True,
                ),
            ),
        ),
    ),
)
