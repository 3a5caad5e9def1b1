"""Board: the API, its streams and webhooks, retention, and the Kubernetes API server."""

from dataclasses import replace

from tools.grafana_boards.panels import (
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

_OPERATOR_ONLY = "Only operators on Kubernetes export it."
_REQUESTS = 'ebbtide_api_requests_total{@, route!="/readyz"}'
KUBERNETES_PANELS = (
    Panel(
        Kind.GRAPH,
        "Operators by state",
        "leading: holds the lease. waiting: standby. blind: elected, but its cluster view is stale.",
        {"{{standing}}": "sum by (standing) (ebbtide_operator_standing{@})"},
        stacked=True,
    ),
    Panel(
        Kind.GRAPH,
        "Time since the last contact with the API server, by kind",
        "A kind that is silent for a minute makes the operator blind.",
        {"{{resource}}": "time() - max by (resource) (ebbtide_kubernetes_heard_timestamp_seconds{@})"},
        "s",
    ),
    Panel(
        Kind.GRAPH,
        "API server requests per second, by verb and status",
        "Status 0: no response.",
        {"{{verb}} {{status}}": "sum by (verb, status) (rate(ebbtide_kubernetes_requests_total{@}[10m])) > 0"},
        "reqps",
    ),
    Panel(
        Kind.GRAPH,
        "Failed API server requests per hour, by resource",
        "403: the role lacks a rule. 404: a definition is missing.",
        hourly('ebbtide_kubernetes_requests_total{@, status!~"2.."}', "resource, status"),
    ),
    Panel(
        Kind.GRAPH,
        "API server request duration, 95th percentile",
        "Including requests that timed out.",
        quantiles("ebbtide_kubernetes_request_duration_seconds", by="verb", window="10m"),
        "s",
    ),
)
SERVICE = Board(
    "service",
    "Service",
    "The API, event streams, webhooks and retention, and the operator's view of Kubernetes.",
    (
        Row(
            "Now",
            (
                stat(
                    "Requests per second",
                    "sum(rate(ebbtide_api_requests_total{@}[10m]))",
                    "reqps",
                    about="Requests of all clients to all API replicas.",
                    thresholds=UNJUDGED,
                ),
                stat(
                    "Responses without error, last hour",
                    'sum(rate(ebbtide_api_requests_total{@, route!="/readyz", status!~"5.."}[1h]))'
                    f" / sum(rate({_REQUESTS}[1h]))",
                    "percentunit",
                    about="Share of the responses whose status is below 500. /readyz answers 503 without a leader.",
                    thresholds=at_least(0.999, 0.95),
                ),
                stat(
                    "95% of the responses within",
                    "histogram_quantile(0.95, sum by (le) (rate(ebbtide_api_request_duration_seconds_bucket{@}[1h])))",
                    "s",
                    about="Duration of requests of the last hour; of a stream, the time until it starts.",
                    thresholds=at_most(0.25, 1),
                ),
                stat(
                    "Open event streams, now",
                    "sum(ebbtide_streams{@})",
                    about="Clients that follow events or logs.",
                    thresholds=UNJUDGED,
                ),
                stat(
                    "Oldest pending webhook",
                    "max(ebbtide_webhook_lag_seconds{@})",
                    "s",
                    about="Age of the oldest delivery that has not succeeded.",
                    thresholds=at_most(60, 600),
                ),
                stat(
                    "Dead webhooks, last day",
                    'sum(increase(ebbtide_webhook_deliveries_total{@, outcome="dead"}[1d]))',
                    about="Deliveries that failed in all attempts.",
                    thresholds=at_most(1, 10),
                ),
            ),
        ),
        Row(
            "API",
            (
                Panel(
                    Kind.HEATMAP,
                    "Request duration",
                    "Number of requests by duration.",
                    buckets("ebbtide_api_request_duration_seconds"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Request duration by route, 95th percentile",
                    "Points are exemplars: each opens the trace of a request, if tracing is on.",
                    quantiles("ebbtide_api_request_duration_seconds", by="route", window="10m"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Requests per second by status",
                    "5xx: errors of the service. 429: rate limits.",
                    {"{{status}}": "sum by (status) (rate(ebbtide_api_requests_total{@}[10m]))"},
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    Kind.BARS,
                    "Errors by route, last hour",
                    "Responses with status 500 or more.",
                    {
                        "{{route}} {{status}}": "sum by (route, status) "
                        '(increase(ebbtide_api_requests_total{@, status=~"5.."}[1h])) > 0'
                    },
                    thresholds=at_most(1, 10),
                    empty="The API has no error on the simulated day.",
                ),
                Panel(
                    Kind.GRAPH,
                    "Connections",
                    "Open connections of all API replicas.",
                    {"open": "sum(ebbtide_connections{@})"},
                    empty="The simulated day calls the application without connections.",
                ),
                Panel(
                    Kind.GRAPH,
                    "Connections closed early, per hour",
                    "Closed before they had a response, or refused, by reason.",
                    hourly("ebbtide_connections_closed_total{@}", "reason"),
                    empty="The simulated day calls the application without connections.",
                ),
                Panel(Kind.GRAPH, "Version", "Installed release.", latest("ebbtide_build_info{@}", "version")),
            ),
        ),
        Row(
            "Webhooks, streams and retention",
            (
                Panel(
                    Kind.GRAPH,
                    "Webhook delivery attempts per hour",
                    "After an attempt that ends dead there are no retries.",
                    hourly("ebbtide_webhook_deliveries_total{@}", "outcome"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Age of the oldest pending webhook",
                    "0: none is pending.",
                    latest("ebbtide_webhook_lag_seconds{@}", legend="age"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Open event streams",
                    "Clients that follow events or logs.",
                    {"open": "sum(ebbtide_streams{@})"},
                ),
                Panel(
                    Kind.GRAPH,
                    "Removed by retention, per day",
                    "Rows by kind, and jobs whose logs were removed. Retention runs once a day.",
                    {"{{kind}}": "sum by (kind) (increase(ebbtide_swept_total{@}[1d])) > 0"},
                ),
            ),
        ),
        Row(
            "Savings",
            (
                Panel(
                    Kind.GRAPH,
                    "Daily comparisons of savings",
                    "One a day. `failed` has its reason on the page about savings and in the log of the controller.",
                    {"{{outcome}}": "sum by (outcome) (increase(ebbtide_savings_comparisons_total{@}[1d]))"},
                    empty="The simulated day has no database, so that nothing is compared.",
                ),
            ),
        ),
        Row("Kubernetes", tuple(replace(panel, empty=_OPERATOR_ONLY) for panel in KUBERNETES_PANELS)),
    ),
)
