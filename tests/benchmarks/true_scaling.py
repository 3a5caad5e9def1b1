"""`python -m tests.benchmarks.true_scaling`: the regimes with ground truth that differs from what policies believe.

Jobs with 2 or more GPUs have models by their size. Each job's speed deviates from its curve by a seeded error
(15%), and
declared durations are within 50% of the truth (`scheduler.simulator.ground_truth`). `lyra` and `afs` assume linear
scaling. Prints Markdown: means over the seeds, and their range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

from tests.benchmarks.regime import LINEAR, REGIMES, TRUTH, UNPRICED, Play, Report, load_or_simulate_reports
from tests.benchmarks.regimes import RIVALS, arguments, bound_gain, exit_with, gain, title

UNLENT = "ebbtide-scaling"
POLICIES = ("fifo", *RIVALS, "ebbtide", LINEAR, UNPRICED, UNLENT)
SEEDS = (0, 1, 2)
WITHOUT = {LINEAR: "the curves", UNPRICED: "the price of reconfiguration", UNLENT: "lending"}

Figure = Callable[[Report, Report], float]
Seeded = Mapping[str, Sequence[Report]]
"""Reports by policy, one per seed."""

COLUMNS: Mapping[str, tuple[Figure, str]] = {
    "waiting, mean": (lambda one, fifo: float(one["queueing_s"]["mean"]), ",.0f"),
    "JCT, mean": (lambda one, fifo: float(one["jct_s"]["mean"]), ",.0f"),
    "JCT, p95": (lambda one, fifo: float(one["jct_s"]["p95"]), ",.0f"),
    "JCT from 2 GPUs on": (lambda one, fifo: float(one["jct_elastic_s"]["mean"]), ",.0f"),
    "JCT over fifo": (gain, ".3f"),
    "of bound": (lambda one, fifo: bound_gain(fifo), ".3f"),
    "resizes": (lambda one, fifo: float(one["resizes"]), ",.0f"),
    "preempted": (lambda one, fifo: float(one["preemptions"]), ",.0f"),
    "lost": (lambda one, fifo: float(one["lost_ratio"]), ".2%"),
    "usage": (lambda one, fifo: float(one["usage_ratio"]["overall"]), ".1%"),
}


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean, minimum and maximum."""
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(reports: Seeded) -> Iterator[str]:
    yield f"| policy | {' | '.join(COLUMNS)} |"
    yield "|---|" + "---:|" * len(COLUMNS)
    for policy, seeded in reports.items():
        pairs = list(zip(seeded, reports["fifo"], strict=True))
        cells = (spread([figure(one, fifo) for one, fifo in pairs], form) for figure, form in COLUMNS.values())
        yield f"| {policy} | {' | '.join(cells)} |"


def gains(reports: Seeded) -> Iterator[str]:
    """Return by how much `ebbtide` is faster than each other policy, per seed, and the contribution of each of its
    parts.

    A contribution is the share of the gain over fifo that is lost without the part. Contributions overlap; ordering and
    scaling themselves are the remainder.
    """
    ours = _jct_s(reports["ebbtide"])
    for name in ("fifo", *RIVALS):
        if name in reports:
            ratios = [theirs / own for theirs, own in zip(_jct_s(reports[name]), ours, strict=True)]
            yield f"- mean JCT of `{name}` over `ebbtide`'s: {spread(ratios, '.3f')}"
    won_s = [fifo - own for fifo, own in zip(_jct_s(reports["fifo"]), ours, strict=True)]
    for name, part in WITHOUT.items():
        if name in reports:
            lacking_s = _jct_s(reports[name])
            shares = [(less - own) / won for less, own, won in zip(lacking_s, ours, won_s, strict=True)]
            yield f"- of the gain over fifo, gone without {part}: {spread(shares, '.1%')}"


def _jct_s(seeded: Sequence[Report]) -> list[float]:
    return [float(report["jct_s"]["mean"]) for report in seeded]


def main(given: Sequence[str]) -> int:
    parser = arguments(POLICIES, "Every policy where jobs scale as their models do, as Markdown.")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    options = parser.parse_args(given)
    rows, policies = options.rows, options.policies.split(",")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    plays = {
        (row, policy, seed): Play(row, policy, seed=seed, truth=TRUTH, limit=options.limit)
        for row in rows
        for seed in seeds
        for policy in policies
    }
    reports = load_or_simulate_reports(tuple(plays.values()), options.cache, processes=options.processes)
    for row in rows:
        here = {policy: [reports[plays[row, policy, seed]] for seed in seeds] for policy in policies}
        print(f"\n### {title(REGIMES[row])}, true scaling, {len(seeds)} seeds\n", *table(here), "", sep="\n")
        print(*gains(here), sep="\n")
    return 0


if __name__ == "__main__":
    exit_with(main)
