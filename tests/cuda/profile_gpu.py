"""`python -m tests.cuda.profile_gpu OUT [SECONDS]`: profile one GPU, and validate that on a GPT of 1e9 weights.

The steps run in bf16 by autocast, with and without recompute, at 1,024 to 4,096 tokens, in micro-batches of 4,096 to
16,384 tokens. OUT gets the profile, all single measurements, the table and the chart of the validation, an archive of
Galvatron's files, and what was printed. It begins no measurement after SECONDS (default 180). The exit status is that
of `ebbtide profile`, or 1 if the median error of time or memory is above 10%.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ERROR_MAX = 0.10


def main(out: Path, limit_s: str = "180") -> int:
    words = ["--device", "cuda", "--rounds", "1", "--allow-busy", "--time-limit", limit_s]
    return profile_and_validate(out / "gpu.json", words, time_error_max=ERROR_MAX, memory_error_max=ERROR_MAX)


def profile_and_validate(profile: Path, words: Sequence[str], *, time_error_max: float, memory_error_max: float) -> int:
    """Run `ebbtide profile --validate`, print what it found, and return the exit status."""
    out = profile.parent
    out.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "cli", "profile", *words, "--validate", "--out", str(profile), "-o", "json"]
    argv += ["--table", str(out / "validation.csv")]
    if find_spec("matplotlib") is not None:
        argv += ["--plot", str(out / "validation.png")]
    with tempfile.TemporaryDirectory() as folder:
        galvatron = Path(folder) / "galvatron"
        argv += ["--galvatron", str(galvatron)]
        ended = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
        if galvatron.is_dir():
            shutil.make_archive(str(out / "galvatron"), "zip", galvatron)
    (out / "profile-run.json").write_text(ended.stdout)
    if not ended.stdout:
        return ended.returncode
    document = json.loads(ended.stdout)
    _print_result(document)
    time, memory = (document["validation"][name]["median"] for name in ("time", "memory"))
    return ended.returncode or int(time > time_error_max or memory > memory_error_max)


def _print_result(document: Mapping[str, Any]) -> None:
    validation = document["validation"]
    print(json.dumps({"device": document["device"], "skipped": document["skipped"], "failed": document["failed"]}))
    for name, figure in document["figures"].items():
        print(f"{name:32} {figure['value']!s:24.24} {figure['source'].partition(';')[0]}")
    for step in validation["steps"]:
        print(
            f"seq {step['sequence']:5} t{step['tensor']} d{step['data']} p{step['pipeline']} z{step['zero']} "
            f"micro-batch {step['micro_batch']:3} x {step['micro_batches']} "
            f"{step['recompute']:5} {step['measured_s']:.4f} s {step['time_error']:+.1%} "
            f"(spread {step['spread']:.1%}), {step['measured_bytes'] / 1e9:.2f} GB {step['memory_error']:+.1%}"
        )
    print(json.dumps({name: validation[name] for name in ("time", "memory", "terms")}, indent=1))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:3]))
