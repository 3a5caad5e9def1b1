"""`python -m tests.benchmarks.regimes`: all policies in all regimes, and the targets that `ebbtide` meets.

Prints Markdown. EBBTIDE_DATA names the folder of traces. A full run takes hours on two cores, so each report is saved
in --cache and the table can be continued. All values are relative to `fifo`: without `fifo` in --policies, reports are
saved and no table is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.benchmarks.regime import ORACLE, REGIMES, Play, Regime, Report, load_or_simulate_reports

POLICIES = ("fifo", "opportunistic", "afs", "lyra", "ebbtide", "ebbtide-loaning", "ebbtide-scaling", ORACLE)
RIVALS = ("opportunistic", "afs", "lyra")
SHORT_RATIO_MAX = 0.001
IDLE_RATIO_MAX = 0.05
P95_RATIO_MAX = 1.005
RESIZES_RATIO_MAX = 0.5

Reports = Mapping[str, Report]
Cell = Callable[[Report, Report], str]
Check = tuple[str, str, bool]

COLUMNS: Mapping[str, Cell] = {
    "waiting, mean": lambda one, fifo: f"{one['queueing_s']['mean']:,.0f} s",
    "JCT, mean": lambda one, fifo: f"{one['jct_s']['mean']:,.0f} s",
    "JCT, p95": lambda one, fifo: f"{one['jct_s']['p95']:,.0f} s",
    "JCT from 2 GPUs on": lambda one, fifo: f"{one['jct_elastic_s']['mean']:,.0f} s",
    "JCT over fifo": lambda one, fifo: f"{gain(one, fifo):.2f}",
    "of bound": lambda one, fifo: f"{bound_gain(fifo):.2f}",
    "resizes": lambda one, fifo: f"{one['resizes']:,}",
    "preempted": lambda one, fifo: f"{one['preemptions']:,}",
    "lost": lambda one, fifo: f"{one['lost_ratio']:.2%}",
    "late": lambda one, fifo: f"{one['recalls_late']}",
    "short": lambda one, fifo: f"{one['inference_short_intervals_ratio']['first_pass']:.3%}",
    "idle while waiting": lambda one, fifo: f"{one['idle_while_waiting_gpu_hours']:,.0f} GPU h",
    "usage": lambda one, fifo: f"{one['usage_ratio']['overall']:.1%}",
}


def gain(one: Report, fifo: Report) -> float:
    return float(fifo["jct_s"]["mean"]) / float(one["jct_s"]["mean"])


def bound_gain(fifo: Report) -> float:
    return float(fifo["jct_s"]["mean"]) / float(fifo["jct_bound_s"])


def table(reports: Reports) -> Iterator[str]:
    """Return a Markdown table with one row per policy."""
    yield f"| policy | {' | '.join(COLUMNS)} |"
    yield "|---|" + "---:|" * len(COLUMNS)
    for policy, one in reports.items():
        yield f"| {policy} | {' | '.join(cell(one, reports['fifo']) for cell in COLUMNS.values())} |"


def checks(regime: Regime, reports: Reports) -> Iterator[Check]:
    """Return (target, measured, met) of `ebbtide`. Policies without a report set no target."""
    ours, fifo, bars = reports["ebbtide"], reports["fifo"], regime.bars
    waiting_s, jct_s = ours["queueing_s"]["mean"], ours["jct_s"]["mean"]
    if bars.jct_gain_min is not None:
        yield _minimum(f"JCT over fifo at least {bars.jct_gain_min}", gain(ours, fifo), bars.jct_gain_min)
    if bars.waiting_s_max is not None:
        met = waiting_s <= bars.waiting_s_max
        yield f"mean waiting at most {bars.waiting_s_max:.0f} s", f"{waiting_s:.1f} s", met
    if bars.waiting_gain_min is not None:
        ratio = fifo["queueing_s"]["mean"] / waiting_s if waiting_s else float("inf")
        yield _minimum(f"waiting at least {bars.waiting_gain_min} times lower than fifo", ratio, bars.waiting_gain_min)
    if bars.usage_gain_min is not None:
        ratio = ours["usage_ratio"]["overall"] / fifo["usage_ratio"]["overall"]
        yield _minimum(f"usage at least {bars.usage_gain_min} of fifo's", ratio, bars.usage_gain_min)
    for name in (rival for rival in RIVALS if rival in reports):
        rival_s = reports[name]["jct_s"]["mean"]
        yield f"JCT below {name}", f"{jct_s:,.0f} s, {name} {rival_s:,.0f} s", jct_s < rival_s
    yield from _stays_low(reports, bars.lost_ratio_max)


def _stays_low(reports: Reports, lost_ratio_max: float) -> Iterator[Check]:
    ours, fifo, lyra = reports["ebbtide"], reports["fifo"], reports.get("lyra")
    if rivals := [reports[name]["jct_s"]["p95"] for name in RIVALS if name in reports]:
        ratio = ours["jct_s"]["p95"] / min(rivals)
        yield f"p95 of JCT at most {P95_RATIO_MAX} of the best rival's", f"{ratio:.3f}", ratio <= P95_RATIO_MAX
    if lyra:
        few = ours["resizes"] <= RESIZES_RATIO_MAX * lyra["resizes"]
        yield "at most half of lyra's resizes", f"{ours['resizes']:,} of {lyra['resizes']:,}", few
        fewer = ours["preemptions"] <= lyra["preemptions"]
        yield "preemptions at most lyra's", f"{ours['preemptions']:,} of {lyra['preemptions']:,}", fewer
    lost, short = ours["lost_ratio"], ours["inference_short_intervals_ratio"]["first_pass"]
    yield f"lost at most {lost_ratio_max:.1%}", f"{lost:.2%}", lost <= lost_ratio_max
    yield "no recall late", f"{ours['recalls_late']} of {ours['recalls']:,}", ours["recalls_late"] == 0
    yield f"inference short in at most {SHORT_RATIO_MAX:.1%}", f"{short:.3%}", short <= SHORT_RATIO_MAX
    idle_h, fifo_idle_h = ours["idle_while_waiting_gpu_hours"], fifo["idle_while_waiting_gpu_hours"]
    saved = f"{idle_h:,.0f} of {fifo_idle_h:,.0f} GPU h"
    yield "idle while a job waits at least 95% below fifo", saved, idle_h <= IDLE_RATIO_MAX * fifo_idle_h


def _minimum(bar: str, value: float, least: float) -> Check:
    return bar, f"{value:.3f}", value >= least


def title(regime: Regime) -> str:
    elastic = "" if regime.elastic_ratio is None else f", {regime.elastic_ratio:.0%} of the jobs elastic"
    return f"itp_cluster{regime.trace} on {regime.nodes} + {regime.nodes} nodes of 8 ({regime.name}{elastic})"


def _rows(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in REGIMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; allowed: {', '.join(REGIMES)}")
    return text.split(",")


def arguments(policies: Sequence[str], about: str) -> argparse.ArgumentParser:
    """Add the options of both tables."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rows", type=_rows, default=list(REGIMES), help=f"of {', '.join(REGIMES)}")
    parser.add_argument("--policies", default=",".join(policies))
    parser.add_argument("--cache", type=Path, default=Path("var/regimes"), help="folder of the kept reports")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=int, default=0, help="only the first so many jobs")
    return parser


def exit_with(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a table's `main` on the command-line arguments and exit with its status, or with the message of its error."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (FileNotFoundError, ValueError) as wrong:
        sys.exit(f"benchmark: {wrong}")


def main(given: Sequence[str]) -> int:
    options = arguments(POLICIES, "Every policy in every regime, as Markdown.").parse_args(given)
    rows, policies = options.rows, options.policies.split(",")
    plays = {(row, policy): Play(row, policy, limit=options.limit) for row in rows for policy in policies}
    reports = load_or_simulate_reports(tuple(plays.values()), options.cache, processes=options.processes)
    for row in rows if "fifo" in policies else ():
        here = {policy: reports[plays[row, policy]] for policy in policies}
        print(f"\n### {title(REGIMES[row])}\n", *table(here), sep="\n")
        if "ebbtide" in here:
            print("\n| bar | measured | met |\n|---|---|---|")
            for bar, measured, met in checks(REGIMES[row], here):
                print(f"| {bar} | {measured} | {'yes' if met else '**no**'} |")
    return 0


if __name__ == "__main__":
    exit_with(main)
