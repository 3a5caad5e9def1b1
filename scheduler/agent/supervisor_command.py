"""The command line of a supervisor, and the interpreter that forks ranks of the reference trainer."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from scheduler.agent import supervisor
from scheduler.agent.container_process import LOCK_FD
from scheduler.agent.run_folder import RunFolder
from scheduler.domain.run_document import RunDocument

logger = logging.getLogger(__name__)

_TRAINER = "scheduler.trainer"
_PROBE_TIMEOUT_S = 60.0
_PROBE = """
import hashlib, importlib.util, pathlib
path = pathlib.Path(importlib.util.find_spec("scheduler.agent.supervisor").origin)
print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def find_trainer_interpreter(variables: Mapping[str, str]) -> str:
    """Return the interpreter whose supervisor forks ranks of the reference trainer, empty if there is none.

    It is the agent's own, if it has the trainer. The interpreter that is injected into pods does not; there it is the
    `python` of the image, if it holds the same supervisor, as that of the worker image does. Without an interpreter,
    ranks of the trainer start as any other program does, and each loads torch itself.

    Args:
        variables: environment of the ranks.
    """
    if importlib.util.find_spec(_TRAINER) is not None:
        return sys.executable
    python = shutil.which("python", path=variables.get("PATH"))
    problem = "its PATH has no python" if python is None else _find_difference(python, frozenset(variables.items()))
    if python is None or problem:
        logger.warning("Ranks of the reference trainer start without a preloaded torch in this image: %s.", problem)
        return ""
    return python


def build_supervisor_command(
    document: RunDocument, folder: RunFolder, lease: Path | None, *, preload: Sequence[str], interpreter: str
) -> tuple[str, ...]:
    """Return the command line. An empty `interpreter` is the agent's own."""
    # -P: the modules of the current directory must not be imported instead of the supervisor's.
    # -I: an agent that was started apart from the variables and packages of the user keeps its supervisors apart too.
    own = (sys.executable, "-I" if sys.flags.isolated else "-P")
    start = (interpreter, "-P") if interpreter else own
    command = [*start, "-m", supervisor.__name__, str(folder.path), "--lock-fd", str(LOCK_FD)]
    if document.node_rank == 0:
        command.append("--reserve-port")
    if lease is not None:
        command += ["--lease", str(lease)]
    return (*command, *(word for module in preload for word in ("--preload", module)))


@cache
def _find_difference(python: str, variables: frozenset[tuple[str, str]]) -> str:
    """Return why the supervisor of another interpreter is not this agent's; empty if it is."""
    try:
        probed = subprocess.run(
            [python, "-P", "-c", _PROBE],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot be started: {error}"
    if probed.returncode != 0:
        last = (probed.stderr.strip().splitlines() or ["no output"])[-1]
        return f"{python} has no supervisor of Ebbtide ({last})"
    own = hashlib.sha256(Path(supervisor.__file__).read_bytes()).hexdigest()
    return "" if probed.stdout.strip() == own else f"{python} has the supervisor of another version of Ebbtide"
