"""Cost of the session to a script: added lines, time of the import, and CPU time per step of 20 ms.

Added lines are those that the examples mark. The time of the import is that which passes in a new process.

`ebbtide.elastic` adds to a step its report, the look for notices and their agreement.
The steps only sleep, and the CPU time of sleeping is subtracted: the rest is the session's, including its threads. Each
rank is a process of its own, and ranks agree over Gloo on the loopback interface. If there is a GPU, one more rank has
its model there and reports a loss that is a tensor of the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from tests.e2e.framework_trainings import count_added_lines

STEP_S, STEPS = 0.02, 500
IMPORTS = 11
EXAMPLES = Path(__file__).parents[2] / "examples"


def rows() -> Iterator[tuple[str, str, str]]:
    for script in sorted(EXAMPLES.rglob("*.py")):
        if added := count_added_lines(script):
            yield f"added lines, {script.relative_to(EXAMPLES)}", "at most 5", str(added)
    yield "import ebbtide, median", "at most 50 ms", f"{1000 * median(measure_import() for _ in range(IMPORTS)):.0f} ms"
    for world_size in (1, 2, 4):
        share = max(measure_ranks(world_size)) / STEP_S
        yield f"session, {world_size} ranks, CPU time per step of 20 ms", "at most 0.5%", f"{share:.2%}"
    if torch.cuda.is_available():
        share = max(measure_ranks(1, device="cuda")) / STEP_S
        yield "session, a rank on a GPU, CPU time per step of 20 ms", "at most 0.5%", f"{share:.2%}"


def measure_import() -> float:
    """Return the seconds that the import takes in a new process."""
    script = "import time; started_s = time.perf_counter(); import ebbtide; print(time.perf_counter() - started_s)"
    return float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)


def measure_ranks(world_size: int, *, device: str = "cpu") -> list[float]:
    """Return the CPU seconds per step of each rank."""
    from tests.loopback import find_free_port

    with tempfile.TemporaryDirectory() as folder:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": str(world_size)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.session_overhead", device],
                env={**os.environ, **shared, "RANK": str(rank), "EBBTIDE_RUN_DIR": folder, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            for rank in range(world_size)
        ]
        return [float(json.loads(rank.communicate()[0])) for rank in ranks]


def _measure_idle_s(device: str) -> float:
    """Return the CPU seconds of a step without a session, which only sleeps and makes its loss."""
    started_s = time.process_time()
    for _ in range(STEPS):
        time.sleep(STEP_S)
        _make_loss(device)
    return (time.process_time() - started_s) / STEPS


def _make_loss(device: str) -> float | torch.Tensor:
    """Return a loss as scripts report it: a number, or a tensor that is still on the GPU."""
    return 1.0 if device == "cpu" else torch.ones((), device=device)


def run_rank(device: str) -> None:
    """Print the CPU seconds per step."""
    from torch.distributed import destroy_process_group, init_process_group

    import ebbtide

    if int(os.environ["WORLD_SIZE"]) > 1:
        init_process_group("gloo")
    model = torch.nn.Linear(8, 8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _make_loss(device)
    idle_s, started_s = _measure_idle_s(device), 0.0
    with ebbtide.elastic(model, optimizer) as run:
        for step in run.steps(STEPS + 1):
            if step == 1:
                started_s = time.process_time()
            time.sleep(STEP_S)
            run.report(loss=_make_loss(device))
        used_s = time.process_time() - started_s
    print(json.dumps(used_s / STEPS - idle_s))
    if int(os.environ["WORLD_SIZE"]) > 1:
        destroy_process_group()


if __name__ == "__main__":
    run_rank(sys.argv[1])
