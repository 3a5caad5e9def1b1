"""Run fault campaigns: `make campaign SEEDS=0:1000`, or one case from a file: `make campaign CASE=FILE`.

A campaign is resumable. Each seed has one line in the file of results, with a fingerprint of the code that ran it, and
seeds that this code has run are skipped. A failing seed is shrunk, and the small case is written beside the results.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from typer import echo

from scheduler.simulator.campaign.case import CaseEventKind, FaultCase, read_case, write_case
from scheduler.simulator.campaign.checks import CaseViolation
from scheduler.simulator.campaign.generation import draw_case
from scheduler.simulator.campaign.run import CaseResult, run_case
from scheduler.simulator.campaign.shrinking import CaseShrinker

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "campaign"


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds or the case, print the counts of faults, and return 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(prog="tools.fault_campaign", description=__doc__)
    parser.add_argument("--seeds", metavar="A:B", type=parse_seeds, help="run the seeds from A up to B, without B")
    parser.add_argument("--case", metavar="FILE", type=Path, help="replay one case that a campaign has written")
    parser.add_argument("--results", metavar="FOLDER", type=Path, default=RESULTS, help="default: build/campaign")
    given = parser.parse_args(arguments)
    if (given.seeds is None) == (given.case is None):
        parser.error("give either --seeds or --case")
    if given.case is not None:
        return _replay(read_case(given.case))
    return _run_seeds(given.seeds, given.results)


def parse_seeds(text: str) -> range:
    """Return the range of `A:B`."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of seeds; write A:B with A below B, such as 0:1000")
    return range(int(first), int(end))


def fingerprint_code() -> str:
    """Return a fingerprint of the sources that decide what a seed does."""
    digest = sha256()
    for path in sorted((ROOT / "scheduler").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _replay(case: FaultCase) -> int:
    result = run_case(case)
    for violation in result.violations:
        echo(describe_violation(case.seed, violation))
    echo(describe_counts(result.counts))
    return 1 if result.violations else 0


def _run_seeds(seeds: range, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    code = fingerprint_code()
    path = folder / f"results-{code}.jsonl"
    done = {line["seed"]: line for line in _read_lines(path)}
    for seed in seeds:
        if seed not in done:
            done[seed] = _run_seed(seed, folder)
            with path.open("a") as file:
                file.write(json.dumps(done[seed]) + "\n")
    lines = [done[seed] for seed in seeds]
    counts = Counter[str]()
    for line in lines:
        counts.update(line["counts"])
    failed = [line["seed"] for line in lines if line["violations"]]
    cpu_s = sum(line["cpu_s"] for line in lines)
    echo(describe_counts(counts))
    echo(f"{len(lines)} seeds, {sum(line['ticks'] for line in lines):,} ticks, {cpu_s / len(lines):.2f} CPU-s a seed")
    echo(f"{len(failed)} seeds violated an invariant{': ' if failed else ''}{', '.join(map(str, failed))}")
    return 1 if failed else 0


def _run_seed(seed: int, folder: Path) -> dict[str, Any]:
    case, started_s = draw_case(seed), time.process_time()
    result = _run(case)
    cpu_s = time.process_time() - started_s
    if result.violations:
        violation = result.violations[0]
        echo(describe_violation(seed, violation))
        small = CaseShrinker(lambda tried: _run(tried).violations).shrink(case, violation)
        write_case(folder / f"seed-{seed}.json", small)
        echo(
            f"seed {seed}: shrunk to {len(small.events)} events and {len(small.jobs)} jobs; "
            f"replay it with: make campaign CASE={folder / f'seed-{seed}.json'}",
        )
    return {
        "seed": seed,
        "policy": case.policy,
        "ticks": result.ticks,
        "cpu_s": round(cpu_s, 3),
        "counts": dict(result.counts),
        "violations": [asdict(violation) for violation in result.violations],
    }


def _run(case: FaultCase) -> CaseResult:
    """Run the case. An exception that no fault explains is a violation, too."""
    try:
        return run_case(case)
    except Exception as error:
        violation = CaseViolation(0.0, f"end-raised-{type(error).__name__}", str(error))
        return CaseResult((violation,), Counter(), 0)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the results in the file. The last line may be cut off if the campaign was killed."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def describe_violation(seed: int, violation: CaseViolation) -> str:
    return f"seed {seed}: {violation.code} at {violation.at_s:.0f} s: {violation.detail}"


def describe_counts(counts: Counter[Any]) -> str:
    """Return the number of each fault and command that had an effect, also of those that never had one."""
    return ", ".join(f"{kind} {counts[kind]}" for kind in CaseEventKind)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # controllers report each fault that they meet
    sys.exit(main())
