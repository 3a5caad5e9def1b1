"""`python -m tests.benchmarks.lyra_comparison`: compares our gains with those published for Lyra.

Prints one Markdown table of gains over a policy set that neither lends nor scales. The share of lending or scaling is
the part of the gain in mean completion time that is lost when it is switched off. Both can gain the same seconds, so
the shares need not add up to 100%. Options and reports are those of `tests.benchmarks.regimes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.benchmarks.regime import REGIMES, Play, Report, load_or_simulate_reports
from tests.benchmarks.regimes import arguments, bound_gain, exit_with, gain

NEITHER, BOTH, SCALING, LENDING = "fifo", "ebbtide", "ebbtide-scaling", "ebbtide-loaning"
POLICIES = (NEITHER, BOTH, SCALING, LENDING)
HEADER = (
    "| GPUs of training and inference | Waiting | Completion | Usage | Bound | Share of lending | Share of scaling |"
)
PUBLISHED = "| Lyra (EuroSys'23), as published | 1.53 | 1.48 | 1.25 | | | |"


def table(rows: Mapping[str, Mapping[str, Report]]) -> Iterator[str]:
    """Return the Markdown table of the reports by regime and policy set."""
    yield HEADER
    yield "|---|" + "---:|" * 6
    yield PUBLISHED
    for row, reports in rows.items():
        yield f"| {_title(row)} | {' | '.join(_cells(reports))} |"


def _title(row: str) -> str:
    regime = REGIMES[row]
    return f"{regime.training_gpu} + {regime.inference_gpu}, itp_cluster{regime.trace}"


def _cells(reports: Mapping[str, Report]) -> Iterator[str]:
    neither, both = reports[NEITHER], reports[BOTH]
    yield f"{neither['queueing_s']['mean'] / max(1.0, both['queueing_s']['mean']):.0f}"
    yield f"{gain(both, neither):.2f}"
    yield f"{both['usage_ratio']['overall'] / neither['usage_ratio']['overall']:.2f}"
    yield f"{bound_gain(neither):.2f}"
    saved_s = neither["jct_s"]["mean"] - both["jct_s"]["mean"]
    for without in (SCALING, LENDING):
        yield f"{(reports[without]['jct_s']['mean'] - both['jct_s']['mean']) / saved_s:.0%}"


def main(given: Sequence[str]) -> int:
    options = arguments(POLICIES, "Our gains and those published for Lyra, as Markdown.").parse_args(given)
    plays = {(row, policy): Play(row, policy, limit=options.limit) for row in options.rows for policy in POLICIES}
    reports = load_or_simulate_reports(tuple(plays.values()), options.cache, processes=options.processes)
    found = {row: {policy: reports[plays[row, policy]] for policy in POLICIES} for row in options.rows}
    print(*table(found), sep="\n")
    return 0


if __name__ == "__main__":
    exit_with(main)
