"""Jobs that start at the same time, on the same machines, form one process group each."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.e2e.machine_site import MachineSite, open_site

SCRIPT = Path(__file__).with_name("meeting_rank.py")
GPUS = 8
STARTS, STARTS_PER_SEED, GLOO_STARTS = 200, 50, 10

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineSite]:
    with open_site(tmp_path_factory.mktemp("site"), disconnect_s=60.0) as opened:
        opened.join("m1", gpus=GPUS, address="127.0.0.2")
        opened.join("m2", gpus=GPUS, address="127.0.0.3")
        shutil.copy(SCRIPT, opened.shared)
        (opened.shared / SCRIPT.name).chmod(0o644)
        yield opened


def start_together(site: MachineSite, sizes: list[int], *words: str, python: str = "python3") -> int:
    """Run jobs of these sizes, submitted at once, and return the number of ranks that met the others of their job."""
    command = [python, str(site.shared / SCRIPT.name), str(site.shared), *words]
    with ThreadPoolExecutor(len(sizes)) as threads:
        submitted = [
            threads.submit(site.submit, f"job{number}", command, gpus=size) for number, size in enumerate(sizes)
        ]
        jobs = {each.result(): size for each, size in zip(submitted, sizes, strict=True)}
    site.wait(lambda: all(site.state(job_id) in ("succeeded", "failed") for job_id in jobs))
    for job_id, size in jobs.items():
        found = [json.loads(path.read_text()) for path in site.shared.glob(f"{job_id}-*.members")]
        assert found == [[[job_id, 1, rank] for rank in range(size)]] * size, (job_id, size)
    return sum(sizes)


def draw_sizes(random: Random, *, jobs_max: int) -> list[int]:
    """Return the ranks of two to `jobs_max` jobs, which fit the machines together."""
    jobs = random.randint(2, jobs_max)
    return [random.randint(1, 2 * GPUS // jobs) for _ in range(jobs)]


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("seed", range(STARTS // STARTS_PER_SEED))
def test_jobs_started_together_never_share_a_group(site: MachineSite, seed: int) -> None:
    random = Random(seed)
    for _ in range(STARTS_PER_SEED):
        start_together(site, draw_sizes(random, jobs_max=8))


@pytest.mark.e2e
@pytest.mark.full
def test_jobs_started_together_never_share_a_gloo_group(site: MachineSite) -> None:
    random = Random(0)
    for _ in range(GLOO_STARTS):
        sizes = [random.randint(1, 2) for _ in range(random.randint(2, 3))]
        start_together(site, sizes, "gloo", python=sys.executable)


@pytest.mark.e2e
@pytest.mark.full
def test_replaced_generation_has_no_store_to_join_again(site: MachineSite) -> None:
    """The port of the first generation is closed once the second one runs, on another port."""
    listing = "import os, pathlib, socket, sys, time\n" + (
        "if os.environ['RANK'] == '0': server = socket.create_server(('', int(os.environ['MASTER_PORT'])))\n"
        "name = '{EBBTIDE_JOB_ID}-{EBBTIDE_GENERATION}-{RANK}.port'.format(**os.environ)\n"
        "pathlib.Path(sys.argv[1], name).write_text(os.environ['MASTER_ADDR'] + ' ' + os.environ['MASTER_PORT'])\n"
        "time.sleep(600)\n"
    )
    command = ["python3", "-c", listing, str(site.shared)]
    job_id = site.submit("replaced", command, gpus=2, gpus_max=2, onResize="restart")

    def read_address(generation: int, ranks: int) -> set[str]:
        paths = list(site.shared.glob(f"{job_id}-{generation}-*.port"))
        return {path.read_text() for path in paths} if len(paths) == ranks else set()

    site.wait(lambda: len(read_address(1, 2)) == 1)
    (first,) = read_address(1, 2)
    host, port = first.split()
    socket.create_connection((host, int(port))).close()
    site.client.scale(job_id, min_gpus=4, max_gpus=4)
    site.wait(lambda: len(read_address(2, 4)) == 1)
    (second,) = read_address(2, 4)
    assert second != first
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    site.client.cancel(job_id)
    site.wait(lambda: site.state(job_id) == "cancelled")
