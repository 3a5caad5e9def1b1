"""Board: jobs from submission to end, and the queues that share the fleet."""

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

_ENDED = "ebbtide_jobs_ended_total{@queue%s}"
_FAILED = _ENDED % ', outcome="failed"'
_SUCCEEDED = _ENDED % ', outcome="succeeded"'
_TRIED = _ENDED % ', outcome=~"failed|succeeded"'
JOBS = Board(
    "jobs-and-queues",
    "Jobs and queues",
    "Pending, running and ended jobs of the chosen queues. Undeclared queues share the empty name.",
    (
        Row(
            "Now",
            (
                stat(
                    "Running jobs",
                    'max(ebbtide_jobs{@, state="running"})',
                    about="Jobs of all queues whose workers run.",
                    thresholds=UNJUDGED,
                    page="#/jobs?state=running",
                ),
                stat(
                    "Pending jobs",
                    "sum(ebbtide_pending_jobs{@queue})",
                    about="Jobs that wait for GPUs, a plan, or a retry.",
                    thresholds=UNJUDGED,
                    page="#/jobs?state=queued",
                ),
                stat(
                    "Wait of 95% of the jobs, last day",
                    "histogram_quantile(0.95, sum by (le) (rate(ebbtide_queueing_seconds_bucket{@}[1d])))",
                    "s",
                    about="Time from submission to first start, of jobs of all queues that started in the last day.",
                    thresholds=at_most(3600, 14_400),
                ),
                stat(
                    "Failed jobs, last day",
                    f"sum(increase({_FAILED}[1d]))",
                    about="Jobs that failed after all retries, or can never run.",
                    thresholds=at_most(1, 5),
                    page="#/jobs?state=failed",
                ),
                stat(
                    "Jobs that succeed, last day",
                    f"sum(increase({_SUCCEEDED}[1d])) / sum(increase({_TRIED}[1d]))",
                    "percentunit",
                    about="Share of the ended jobs that succeeded. Cancelled jobs do not count.",
                    thresholds=at_least(0.95, 0.8),
                ),
                stat(
                    "Jobs in a restart loop",
                    "max(ebbtide_restarting_jobs{@})",
                    about="Live jobs with three or more unexpected ends of runs within the last hour.",
                    thresholds=at_most(1, 2),
                ),
            ),
        ),
        Row(
            "Queues",
            (
                Panel(
                    Kind.BARS,
                    "Allocated GPUs by queue",
                    "GPUs of placed jobs, above the guarantee of the queue or below it.",
                    latest("ebbtide_queue_allocated_gpus{@queue}", "queue"),
                    thresholds=UNJUDGED,
                ),
                Panel(
                    Kind.BARS,
                    "Pending jobs by queue",
                    "Jobs that wait for GPUs, a plan, or a retry.",
                    {"{{queue}}": "sum by (queue) (ebbtide_pending_jobs{@queue})"},
                    thresholds=at_most(20, 100),
                ),
                Panel(
                    Kind.GRAPH,
                    "Allocated and guaranteed GPUs by queue",
                    "A queue gets its guarantee back from queues that borrow.",
                    latest("ebbtide_queue_allocated_gpus{@queue}", "queue")
                    | latest("ebbtide_queue_guaranteed_gpus{@queue}", "queue", "{{queue}}, guaranteed"),
                ),
                Panel(
                    Kind.GRAPH,
                    "Borrowed GPUs by queue",
                    "Allocated GPUs above the guarantee.",
                    latest("ebbtide_queue_borrowed_gpus{@queue}", "queue"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "GPUs by queue and owner",
                    "own: nodes of training. lent: nodes of inference.",
                    latest("ebbtide_queue_gpus{@queue}", "queue, kind"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Pending jobs by reason",
                    "`ebbtide explain JOB` has the sentence for one job.",
                    {"{{reason}}": "sum by (reason) (ebbtide_pending_jobs{@queue})"},
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Waits and ends",
            (
                Panel(
                    Kind.HEATMAP,
                    "Time from submission to first start",
                    "Number of jobs by how long they waited.",
                    buckets("ebbtide_queueing_seconds"),
                    "s",
                ),
                Panel(
                    Kind.HEATMAP,
                    "Job completion time",
                    "Number of succeeded jobs by the time from submission to end.",
                    buckets("ebbtide_jct_seconds"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Time from submission to first start, quantiles",
                    "Half of the jobs, and 95 of 100, started within this time.",
                    quantiles("ebbtide_queueing_seconds"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Jobs by state",
                    "Jobs of all queues that have not ended.",
                    latest("ebbtide_jobs{@}", "state"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Ended jobs per hour by outcome",
                    "succeeded, failed or cancelled.",
                    hourly(_ENDED % "", "outcome"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Failed and cancelled jobs per hour by reason",
                    "The code of the decision that ended the job, or the cause of its last failed run.",
                    hourly(_ENDED % ', outcome!="succeeded"', "queue, reason"),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Resizes and restarts",
            (
                Panel(
                    Kind.GRAPH,
                    "Resizes per hour",
                    "By direction and by the reason of the decision.",
                    hourly("ebbtide_resize_total{@}", "direction, reason"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Resize duration, total and by phase",
                    "From the decision until all workers of the new plan run; phases are the 95th percentile.",
                    quantiles("ebbtide_resize_duration_seconds")
                    | quantiles("ebbtide_replan_phase_seconds", by="phase"),
                    "s",
                ),
                Panel(
                    Kind.GRAPH,
                    "Checkpoint bytes loaded by re-plans, per hour",
                    "Bytes that ranks needed, bytes read, and the part of these that another node wrote.",
                    hourly("ebbtide_replan_bytes_total{@}", "kind"),
                    "bytes",
                ),
                Panel(
                    Kind.GRAPH,
                    "Preemptions per hour",
                    "Running jobs that had to release all GPUs.",
                    hourly("ebbtide_preemptions_total{@}", "reason"),
                    stacked=True,
                ),
                Panel(
                    Kind.GRAPH,
                    "Unplanned restarts per hour",
                    "Runs that ended unexpectedly and are retried, and jobs with three of them within an hour.",
                    hourly("ebbtide_restarts_total{@}", "cause")
                    | latest("ebbtide_restarting_jobs{@}", legend="jobs in a restart loop"),
                ),
            ),
        ),
        Row(
            "Running jobs (requires EBBTIDE_METRICS_BY_JOB)",
            (
                Panel(
                    Kind.GRAPH,
                    "Completed steps",
                    "Optimizer steps of each running job.",
                    latest("ebbtide_job_steps{@}", "job"),
                    page="#/jobs/${__field.labels.job}",
                ),
                Panel(
                    Kind.GRAPH,
                    "Loss",
                    "Last reported loss of each running job.",
                    latest("ebbtide_job_loss{@}", "job"),
                    page="#/jobs/${__field.labels.job}",
                ),
                Panel(
                    Kind.GRAPH,
                    "Samples per second",
                    "Measured throughput of each running job.",
                    latest("ebbtide_job_samples_per_s{@}", "job"),
                    page="#/jobs/${__field.labels.job}",
                ),
                Panel(
                    Kind.GRAPH,
                    "Peak memory of a rank",
                    "Largest GPU memory use of any rank of each running job.",
                    latest("ebbtide_job_peak_bytes{@}", "job"),
                    "bytes",
                    page="#/jobs/${__field.labels.job}",
                ),
            ),
        ),
    ),
)
