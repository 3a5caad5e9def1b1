"""The agent's bundle in root file systems that share nothing with it, through a run to its end, against a fake API.

Bubblewrap assembles each root from mounts, which end with its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduler.domain.agent_bundle import BUNDLE_DIR, BUNDLE_PYTHON
from tests.agent.requirements import needs_root
from tests.contract.agent_pod import Pod, a_document, agent_pod
from tools.agent_bundle import ROOTS, build_bundle, list_modules

pytestmark = needs_root

BWRAP = shutil.which("bwrap") or ""
LOADER = Path("/lib64/ld-linux-x86-64.so.2")
SHELL_RANK = """
export -p > $EBBTIDE_RUN_DIR/variables
echo '{"phase": "running", "step": 1}' > $EBBTIDE_RUN_DIR/status-$RANK.json
until [ -e $EBBTIDE_RUN_DIR/notice.json ]; do :; done
"""
OWN_SCHEDULER = """
import json, os, pathlib, sys
import scheduler
known = sorted(name for name in sys.modules if name.partition(".")[0] in ("scheduler", "ebbtide"))
record = {"file": scheduler.__file__, "modules": known, "path": sys.path, "variables": dict(os.environ)}
pathlib.Path(os.environ["EBBTIDE_RUN_DIR"], "rank.json").write_text(json.dumps(record))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundle") / "bundle"
    build_bundle(target)
    return target


@contextmanager
def injected_pod(
    bundle: Path, folder: Path, *, mounts: Sequence[str], image: Mapping[str, str], image_folder: Path
) -> Iterator[Pod]:
    """Start an agent from the bundle in a root file system of these mounts. `image` is the environment of the image.

    The image has variables that would break an agent that heeds them: of Python, and of the dynamic loader.
    """
    wrong = image_folder / "wrong"
    wrong.mkdir()
    for name in ("libpython3.11.so.1.0", "libffi.so.8", "libssl.so.3"):
        (wrong / name).write_text("not a library")
    (wrong / "json.py").write_text("raise ImportError('the module of the user')")
    names = image_folder / "hosts"
    names.write_text("127.0.0.1 control-plane\n")
    command = [
        *(BWRAP, "--unshare-pid", "--as-pid-1", "--die-with-parent", "--tmpfs", "/", *mounts),
        *("--ro-bind", str(wrong), "/wrong", "--ro-bind", str(names), "/etc/hosts"),
        *("--proc", "/proc", "--dev", "/dev", "--ro-bind", str(bundle), BUNDLE_DIR),
        *("--bind", str(folder), str(folder), "--chdir", "/", "--", BUNDLE_PYTHON, "-I", "-m", "scheduler.agent.pod"),
    ]
    variables = {"HOME": "/", "LD_LIBRARY_PATH": "/wrong", "PYTHONPATH": "/wrong", **image}
    with agent_pod(folder, command=command, variables=variables, host="control-plane") as pod:
        yield pod


def test_agent_runs_a_job_in_an_image_with_a_shell_and_nothing_else(bundle: Path, tmp_path: Path) -> None:
    """The root has no Python, no /bin/sh, no C library but that of its only program, no /tmp and no user database."""
    folder, image_folder = tmp_path / "volume", tmp_path / "image"
    folder.mkdir()
    image_folder.mkdir()
    libc = "/lib/x86_64-linux-gnu/libc.so.6"
    shell = os.path.realpath(shutil.which("dash") or "dash")
    mounts = [word for path in (libc, str(LOADER)) for word in ("--ro-bind", os.path.realpath(path), path)]
    mounts += ["--ro-bind", shell, "/bin/dash"]
    image = {"PATH": "/bin", "PYTHONHOME": "/wrong", "MINE": "1"}
    with injected_pod(bundle, folder, mounts=mounts, image=image, image_folder=image_folder) as pod:
        pod.desk.document = a_document(1, 2, command=("dash", "-c", SHELL_RANK))
        pod.wait_until_running()
        pod.desk.notice = {"action": "leave", "step": None, "seconds_left": 50.0}
        pod.wait(lambda: pod.codes() == [0, 0])
        variables = (pod.run_dir() / "variables").read_text()
        pod.desk.ending = {"done": True, "failed": False}
        pod.end(0)
    seen = dict(line.removeprefix("export ").partition("=")[::2] for line in variables.splitlines())
    assert {name: seen[name] for name in ("PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "MINE")} == {
        "PYTHONHOME": "'/wrong'", "PYTHONPATH": "'/wrong'", "LD_LIBRARY_PATH": "'/wrong'", "MINE": "'1'",
    }  # fmt: skip
    assert not {"LC_CTYPE", "LD_PRELOAD"} & seen.keys()
    assert not [value for value in seen.values() if BUNDLE_DIR in value]


def test_rank_imports_its_own_scheduler_and_nothing_of_the_agent(bundle: Path, tmp_path: Path) -> None:
    folder, image_folder = tmp_path / "volume", tmp_path / "image"
    folder.mkdir()
    packages = image_folder / "packages"
    (packages / "scheduler").mkdir(parents=True)
    (packages / "scheduler" / "__init__.py").write_text("MINE = True")
    (packages / "scheduler" / "train.py").write_text(OWN_SCHEDULER)
    site = "/usr/local/lib/python3.11/dist-packages"
    mounts = [
        *("--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local", "--ro-bind", str(packages), site),
        *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin"),
    ]
    image = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/opt/mine"}
    with injected_pod(bundle, folder, mounts=mounts, image=image, image_folder=image_folder) as pod:
        pod.desk.document = a_document(1, 1, command=("python", "-m", "scheduler.train"))
        pod.wait(lambda: pod.codes() == [0])
        rank = json.loads((pod.run_dir() / "rank.json").read_text())
        pod.desk.ending = {"done": True, "failed": False}
        pod.end(0)
    assert rank["file"] == f"{site}/scheduler/__init__.py"
    assert rank["modules"] == ["scheduler"]
    assert "/opt/mine" in rank["path"]
    assert not [path for path in rank["path"] if path.startswith(BUNDLE_DIR)]
    assert rank["variables"]["PYTHONPATH"] == "/opt/mine"


def test_ranks_of_the_reference_trainer_are_forked_by_the_python_of_an_image_that_has_it(
    bundle: Path, tmp_path: Path
) -> None:
    """The image is this installation of Ebbtide, as the worker image is one."""
    folder, image_folder = tmp_path / "volume", tmp_path / "image"
    folder.mkdir()
    image_folder.mkdir()
    installed = {sys.prefix, sys.base_prefix, *(path for path in sys.path if Path(path).is_dir())}
    mounts = [*("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64")]
    mounts += [word for path in sorted(installed) for word in ("--ro-bind", path, path)]
    image = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": "", "LD_LIBRARY_PATH": ""}
    with injected_pod(bundle, folder, mounts=mounts, image=image, image_folder=image_folder) as pod:
        pod.desk.document = a_document(1, 2, command=("python", "-m", "scheduler.trainer.train", "--help"))
        pod.wait(lambda: pod.codes() == [0, 0])
        prepared, started = (
            json.loads((pod.run_dir() / f"{name}.json").read_text()) for name in ("prepared", "started")
        )
        pod.desk.ending = {"done": True, "failed": False}
        pod.end(0)
    assert prepared["loaded"] == ["json"]
    assert started["is_forked"]


def test_init_container_copies_the_bundle_that_it_runs_from(bundle: Path, tmp_path: Path) -> None:
    """In the image, the bundle is at the root, where a container runtime adds its own folders."""
    image, volume = tmp_path / "image", tmp_path / "volume"
    volume.mkdir()
    shutil.copytree(bundle, image, symlinks=True)
    command = [
        *(BWRAP, "--bind", str(image), "/", "--proc", "/proc", "--dev", "/dev", "--bind", str(volume), "/volume"),
        *("--", BUNDLE_PYTHON, "-I", "-m", "scheduler.agent.bundle_copy", "/volume"),
    ]
    for _restart in range(2):
        subprocess.run(command, check=True, env={})
    assert sorted(path.name for path in volume.iterdir()) == ["bin", "lib"]
    assert (volume / "bin" / "python3").read_bytes() == (bundle / "bin" / "python3").read_bytes()
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in volume.rglob("*"))


def test_bundle_holds_the_modules_that_the_agent_imports_and_no_other(bundle: Path) -> None:
    own, others = list_modules(ROOTS)
    (packages,) = bundle.glob("lib/python3.*/site-packages")
    assert {path.stem for path in packages.iterdir()} - {"__pycache__"} == {"scheduler", "ebbtide", *others}
    assert others == {"psutil", "pynvml"}
    assert {name.partition(".")[2].partition(".")[0] for name in own if name.startswith("scheduler.")} == {
        "agent", "domain", "executors", "plan_export",
    }  # fmt: skip
