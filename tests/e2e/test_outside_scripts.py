"""Scripts of outside projects run to their end on two machines, and are listed without invented progress."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.framework_trainings import FRAMEWORKS, has_frameworks
from tests.e2e.machine_site import MachineSite, open_site

SCRIPT = Path(__file__).with_name("outside_scripts.py")
STEPS, GPUS = 4, 4
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes", "{nnodes}", "--node-rank", "{node_rank}"),
    *("--nproc-per-node", "{nproc_per_node}", "--master-addr", "{master_addr}", "--master-port", "{master_port}"),
)
UNREPORTED = ("steps", "steps_total", "fraction", "step_time_s", "samples_per_s", "remaining_s", "loss")

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    pytest.mark.e2e,
    pytest.mark.full,
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineSite]:
    with open_site(tmp_path_factory.mktemp("site"), disconnect_s=60.0) as opened:
        opened.join("m1", gpus=GPUS // 2, address="127.0.0.2")
        opened.join("m2", gpus=GPUS // 2, address="127.0.0.3")
        yield opened


@pytest.mark.parametrize(
    ("style", "launcher", "venv"),
    [
        pytest.param("ddp", (), sys.prefix, id="nanogpt"),
        pytest.param("ddp", TORCHRUN, sys.prefix, id="mingpt-under-torchrun"),
        pytest.param("hf", (), str(FRAMEWORKS), id="hugging-face"),
        pytest.param("lightning", (), str(FRAMEWORKS), id="lightning"),
    ],
)
def test_script_of_an_outside_project_runs_to_its_end(
    site: MachineSite, tmp_path: Path, style: str, launcher: Sequence[str], venv: str
) -> None:
    if venv != sys.prefix and not has_frameworks():
        pytest.skip("no training frameworks: run `make frameworks`")
    shutil.copy(SCRIPT, tmp_path / "train.py")
    options = ("--launch", "node") if launcher else ()
    job_id = site.run_command(
        *("submit", "--name", style, "--workdir", str(tmp_path), "--min", str(GPUS), "-q", *options),
        *("--venv", venv, "--", "python", *launcher, "train.py", style),
    )
    site.wait(lambda: site.state(job_id) in ("running", "succeeded", "failed"))
    _check_listing(site, job_id)
    site.wait(lambda: site.state(job_id) in ("succeeded", "failed"))
    lines = [line["text"] for line in site.client.logs(job_id, rank=0)]
    assert site.state(job_id) == "succeeded", lines
    assert lines[-1] == f"finished {STEPS} of {GPUS}"
    _check_listing(site, job_id)


def _check_listing(site: MachineSite, job_id: str) -> None:
    """Check that a job which never reported has neither steps, nor a throughput, nor an end."""
    progress = dict(site.client.job(job_id)["progress"])
    assert {name: progress[name] for name in UNREPORTED} == dict.fromkeys(UNREPORTED)
    (row,) = (line for line in site.run_command("ps", "--all").splitlines() if line.startswith(job_id))
    assert "not reported" in row
    assert "%" not in row
