"""The service from its wheels: the first job of the README, in an environment without the checkout."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tests.distribution.wheels import ROOT, build_wheels, create_environment, install, run
from tests.docs.shell_blocks import read_blocks
from tests.e2e.test_documentation import NewUser, script_of

CHARTS = ROOT / "api" / "console" / "node_modules" / "uplot"
SHORT_JOB = """
JOB=$(ebbtide submit -q --name short --min 1 --max 1 --model tiny-gpt --global-batch 12 --steps 20 \\
    --command "python -m scheduler.trainer.train --model tiny-gpt --steps 20")
until ebbtide describe $JOB -o json | grep -q '"state": "succeeded"'; do sleep 0.5; done
ebbtide assets export assets
test -f assets/crds/pools.yaml -a -f assets/systemd/ebbtide.service
"""
WHERE = """
import api, cli, ebbtide, scheduler, sys
print(*(module.__file__ for module in (api, cli, ebbtide, scheduler) if not module.__file__.startswith(sys.prefix)))
"""


@pytest.mark.e2e
@pytest.mark.full
def test_the_first_job_of_the_readme_runs_from_the_wheels(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "user").mkdir()
    wheels = build_wheels(tmp_path / "build")
    python = create_environment(tmp_path / "venv", has_packages=True)
    assert install(python, wheels, "ebbtide[server]").keys() == {"ebbtide", "ebbtide-server"}
    assert run(str(python), "-P", "-c", WHERE).strip() == ""
    user = NewUser(tmp_path / "user", programs=python.parent)
    try:
        user.wait_ready()
        user.run(script_of(read_blocks(ROOT / "README.md")))
        user.run(SHORT_JOB)
        with urllib.request.urlopen(user.url, timeout=30) as page:
            assert ("charts.js" in page.read().decode()) is CHARTS.exists()
    finally:
        user.close()
