"""Board: whether lending leaves inference what it needs."""

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
    hourly,
    latest,
    stat,
)

_SUPPLY = "max by (pool) (ebbtide_inference_supply_gpus{@pool})"
_SPARE = f"{_SUPPLY} - max by (pool) (ebbtide_inference_demand_gpus{{@pool}})"
_NO_SHADOW = "No pool of the simulated day is in shadow mode."
_NO_MODELS = "No pool of the simulated day sizes served models."
INFERENCE = Board(
    "inference-safety",
    "Inference safety",
    "Demand, forecast and supply of the chosen pools, and the promises that lending keeps.",
    (
        Row(
            "Now",
            (
                stat(
                    "Spare GPUs, worst pool",
                    f"min({_SPARE})",
                    about="GPUs of the pool that are not lent and above its demand. Below 0, inference is short.",
                    thresholds=at_least(1, 0),
                ),
                stat(
                    "Short intervals, worst pool",
                    "max(ebbtide_lending_shortage_ratio{@pool})",
                    "percentunit",
                    about="Share of five-minute intervals in which loans left the worst pool short.",
                    thresholds=at_most(0.001, 0.01),
                ),
                stat(
                    "Late recalls, last day",
                    "sum(increase(ebbtide_recalls_late_total{@}[1d]))",
                    about="Lent nodes that were not home by their deadline.",
                    thresholds=at_most(1, 2),
                    page="#/loans",
                ),
                stat(
                    "Budget of short intervals left",
                    "min(ebbtide_lending_budget_ratio{@pool})",
                    "percentunit",
                    about="At 0, loans follow the most cautious quantile until a short interval is four weeks old.",
                    thresholds=at_least(0.5, 0.1),
                ),
                stat(
                    "Age of demand, worst pool",
                    "max(ebbtide_demand_age_seconds{@pool})",
                    "s",
                    about="Time since the newest reading. Old ones stop new loans, then all loans are recalled.",
                    thresholds=at_most(900, 1800),
                ),
                stat(
                    "Demand",
                    "max(ebbtide_demand_lost{@pool})",
                    about="Lost: readings are so old that all loans of a pool are recalled.",
                    thresholds=at_most(1, 1),
                    states={0: ("known", GOOD), 1: ("lost", BAD)},
                ),
            ),
        ),
        Row(
            "Demand and supply",
            (
                Panel(
                    Kind.GRAPH,
                    "Demand, forecast and supply",
                    "GPUs that inference needs, the forecast of the largest demand within the horizon, and supply.",
                    latest("ebbtide_inference_demand_gpus{@pool}", "pool", "{{pool}}, demand")
                    | latest("ebbtide_forecast_gpus{@pool}", "pool, quantile", "{{pool}}, forecast {{quantile}}")
                    | {"{{pool}}, supply without loans": _SUPPLY},
                    width=24,
                ),
                Panel(
                    Kind.GRAPH,
                    "Spare GPUs above demand",
                    "Below 0, inference is short of GPUs while nodes are on loan.",
                    {"{{pool}}": _SPARE},
                ),
                Panel(
                    Kind.BARS,
                    "Intervals, last day",
                    "Five-minute intervals by whether loans left inference short.",
                    {
                        "{{pool}}, {{outcome}}": "sum by (pool, outcome) "
                        "(increase(ebbtide_inference_intervals_total{@pool}[1d]))"
                    },
                    thresholds=UNJUDGED,
                ),
                Panel(
                    Kind.STATES,
                    "Demand readings",
                    "Lost: readings are so old that all loans of the pool are recalled.",
                    latest("ebbtide_demand_lost{@pool}", "pool"),
                    width=24,
                    states={0: ("known", GOOD), 1: ("lost", BAD)},
                ),
                Panel(
                    Kind.GRAPH,
                    "Age of the newest demand reading",
                    "Half an hour by default stops new loans; later all loans are recalled.",
                    latest("ebbtide_demand_age_seconds{@pool}", "pool"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Replicas of served models",
                    "Replicas that meet the objective at the reported rate, and replicas that are proposed.",
                    latest("ebbtide_serving_needed_replicas{@pool}", "pool, model", "{{pool}}, {{model}}, needed")
                    | latest(
                        "ebbtide_serving_proposed_replicas{@pool}", "pool, model", "{{pool}}, {{model}}, proposed"
                    ),
                    empty=_NO_MODELS,
                ),
                Panel(
                    Kind.GRAPH,
                    "Requests per second of served models",
                    "Rate that the demand source reported.",
                    latest("ebbtide_serving_requests_per_second{@pool}", "pool, model"),
                    "reqps",
                    empty=_NO_MODELS,
                ),
            ),
        ),
        Row(
            "Promises and forecasts",
            (
                Panel(
                    Kind.GRAPH,
                    "Short intervals of four weeks",
                    "Share of five-minute intervals in which loans left inference short, and the promised share.",
                    latest("ebbtide_lending_shortage_ratio{@pool}", "pool", "{{pool}}, short")
                    | latest("ebbtide_lending_shortage_target_ratio{@pool}", "pool", "{{pool}}, promised"),
                    "percentunit",
                ),
                Panel(
                    Kind.GRAPH,
                    "Budget of short intervals that is left",
                    "At 0, loans follow the most cautious quantile until a short interval is four weeks old.",
                    latest("ebbtide_lending_budget_ratio{@pool}", "pool"),
                    "percentunit",
                ),
                Panel(
                    Kind.GRAPH,
                    "Forecast coverage",
                    "Share of forecasts of the last 24 hours that demand did not exceed. Expect the quantile.",
                    latest("ebbtide_forecast_coverage_ratio{@pool}", "pool, quantile"),
                    "percentunit",
                ),
                Panel(
                    Kind.GRAPH,
                    "Evaluated forecasts per hour",
                    "Forecasts that were compared with demand after their horizon.",
                    hourly("ebbtide_forecasts_judged_total{@pool}", "pool"),
                ),
                Panel(
                    Kind.GRAPH,
                    "Broken promises per hour",
                    "Breaches when they begin, by kind.",
                    hourly("ebbtide_breaches_total{@}", "kind"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Broken promises now",
                    "Breaches that were active at the last tick of the leader.",
                    latest("ebbtide_standing_breaches{@}", "kind"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "GPUs that shadow mode would lend",
                    "As many as jobs would use. No node is lent.",
                    latest("ebbtide_shadow_gpus{@pool}", "pool"),
                    empty=_NO_SHADOW,
                ),
                Panel(
                    Kind.GRAPH,
                    "GPU-hours that shadow mode would have lent",
                    "Since the pool entered shadow mode.",
                    latest("ebbtide_shadow_gpu_hours{@pool}", "pool"),
                    "h",
                    empty=_NO_SHADOW,
                ),
            ),
        ),
    ),
)
