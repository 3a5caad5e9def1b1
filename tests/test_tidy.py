"""House rules that no linter knows: sizes, standard names, purity, dead code, nothing that names one machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from vulture import Vulture

from cli.app import SUBCOMMANDS

ROOT = Path(__file__).parent.parent
PACKAGES = ("library/ebbtide", "scheduler", "api", "baselines", "cli")
CONSOLE = ROOT / "api" / "console" / "static"
SCRIPTS, STYLES = sorted(CONSOLE.rglob("*.js")), sorted(CONSOLE.rglob("*.css"))
PURE_FOLDERS = ("domain", "solver", "forecast", "resharding", "scheduling", "serving")
FILE_LINES_MAX = 500
MEDIAN_FILE_LINES = (150, 250)
FUNCTION_LINES_MAX = 60
POSITIONAL_PARAMETERS_MAX = 5
COLUMNS_MAX = 120
VAGUE_MODULE_NAMES = {"utils", "helpers", "common", "misc", "manager"}
IMPURE_CALLS = {
    "time.time", "time.monotonic", "time.perf_counter", "time.sleep", "datetime.now", "datetime.utcnow",
    "date.today", "uuid4", "uuid.uuid4", "uuid.uuid1", "print", "os.urandom",
}  # fmt: skip
RETIRED_NAMES = {
    "Course", "Stock", "Pile", "Room", "Draft", "Intake", "obey", "meagre_offer", "Shadow", "cast_shadow", "come_to",
    "keep_for", "give_way", "outranked", "Claim", "Told", "Taken", "Asked", "Absorbed", "tell", "told", "tell_breach",
    "booked", "stepped", "explained", "tide", "answers", "seating", "keeping", "clearing", "flex", "flexing_stage",
    "owners_stage", "honour_owners", "story", "replan_story", "glances", "verdict", "Present", "gate", "Courier",
    "unlive", "unready", "podded", "forget_the_dead", "sight", "meant", "kept",
}  # fmt: skip
"""Names that the project used to have for a concept that the field has a standard term for."""
USED_FROM_OUTSIDE = {
    "connection_pool_maxsize", "keep_alive",  # of the Kubernetes client's configuration
    "isolation_level", "begin_transaction", "ping",  # of sqlite3's connection, and listeners of SQLAlchemy's events
    "converter", "daemon_threads", "do_GET", "log_message",  # of the standard library's base classes
    "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "validate_checkpoint_id",  # called by torch
    "orig_argv", "total_tokens", "node_deltas", "pending_reasons",  # of sys, anyio and the application's state
    "format_help",  # of the command line, called by Typer
    "persistent_load", "readinto", "seekable",  # of unpicklers and raw files, called by pickle, io and torch
    "__getattr__", "__dir__",  # of a module, called by the interpreter
    "on_train_begin", "on_epoch_begin", "on_log", "on_step_end", "on_epoch_end", "on_prediction_step", "on_save",
    "on_train_end", "resume_from_checkpoint",  # of Hugging Face's callbacks
    "setup", "on_train_start", "on_train_batch_end", "on_validation_batch_end", "on_exception",  # of Lightning's
    "on_fit_end", "on_save_checkpoint",
}  # fmt: skip
"""Names that a library or an operating system uses, each of a class or an object of theirs."""
LIBRARY_DECORATORS = [
    "@*router*",
    "@app*",
    "@*_app*",
    "@event*",
    "@compiles*",
    "@*validator*",
    "@*serializer*",
    "@pytest*",
]
"""Decorators by which a library calls the function."""
_OPENS_FUNCTION = re.compile(r"(\bfunction\b.*|^ +(?:async |#|static )*\w+\([^;]*\) |=> )\{$")


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file, read and parsed once for all rules."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def package(self) -> tuple[str, ...]:
        return self.path.relative_to(ROOT).parts

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


@cache
def _sources() -> tuple[Source, ...]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    read = ((path, path.read_text(encoding="utf-8")) for path in sorted(paths) if "node_modules" not in path.parts)
    return tuple(Source(path, text, ast.parse(text)) for path, text in read)


def _at(path: Path, what: object) -> str:
    return f"{path.relative_to(ROOT)}: {what}"


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {source.path: source.lines for source in _sources()}
    lengths |= {path: len(path.read_text().splitlines()) for path in (*SCRIPTS, *STYLES)}
    assert [_at(path, lines) for path, lines in lengths.items() if lines > FILE_LINES_MAX] == []


def test_the_median_file_holds_a_whole_concept() -> None:
    lengths = [source.lines for source in _sources() if source.tree.body and "migrations" not in source.package]
    assert MEDIAN_FILE_LINES[0] <= median(lengths) <= MEDIAN_FILE_LINES[1]


def test_no_line_of_the_console_is_longer_than_one_of_python() -> None:
    for path in (*SCRIPTS, *STYLES):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= COLUMNS_MAX, _at(path, f"line {number}: {len(line)} columns")


def test_no_function_is_longer_than_a_screen() -> None:
    for source in _sources():
        for function in source.functions():
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, _at(source.path, function.name)


def _script_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the first line and the length of each function, method or arrow function of a script.

    Scripts are indented, so a block ends with the first closing brace at the indentation of its first line.
    """
    lines = path.read_text().splitlines()
    for index, line in enumerate(lines):
        if _OPENS_FUNCTION.search(line):
            end = " " * (len(line) - len(line.lstrip(" "))) + "}"
            yield line.strip(), next(to for to, later in enumerate(lines[index + 1 :], 2) if later.startswith(end))


def test_no_function_of_the_console_is_longer_than_a_screen() -> None:
    for path in SCRIPTS:
        for name, lines in _script_functions(path):
            assert lines <= FUNCTION_LINES_MAX, _at(path, name)


def test_scripts_and_styles_begin_with_a_comment_and_never_insert_text_as_markup() -> None:
    for path in (*SCRIPTS, *STYLES):
        text = path.read_text()
        assert text.startswith(("// ", "/* ")), _at(path, "begins without a comment")
        assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(", text), _at(path, "markup")


def test_functions_have_few_positional_parameters() -> None:
    for source in _sources():
        for function in source.functions():
            names = {arg.arg for arg in (*function.args.posonlyargs, *function.args.args)} - {"self", "cls"}
            assert len(names) <= POSITIONAL_PARAMETERS_MAX, _at(source.path, function.name)


def test_modules_have_a_specific_name_and_a_docstring() -> None:
    for source in _sources():
        assert source.path.stem not in VAGUE_MODULE_NAMES, _at(source.path, source.path.stem)
        assert not source.tree.body or ast.get_docstring(source.tree), _at(source.path, "begins without a docstring")


def test_retired_names_do_not_come_back() -> None:
    defined = {
        _at(source.path, name)
        for source in _sources()
        for name in (source.path.stem, *_defined_names(source.tree))
        if name.lstrip("_") in RETIRED_NAMES
    }
    assert defined == set()


def _defined_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def test_pure_packages_read_no_clock_and_draw_no_random_numbers() -> None:
    for source in _sources():
        if source.package[0] != "scheduler" or source.package[1] not in PURE_FOLDERS:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                drawn = called.startswith(("random.", "np.random.")) and called != "np.random.Generator"
                impure = drawn or called in IMPURE_CALLS
                assert not impure, _at(source.path, f"line {node.lineno}: {called}")


def test_own_processes_do_not_import_from_the_working_directory() -> None:
    """Without -P, `python -m` finds a `scheduler.py` or an `api` of the user's before Ebbtide's packages."""
    for source in _sources():
        assert not re.search(r'sys\.executable, "-m"', source.text), _at(source.path, "python -m without -P")


def test_no_function_class_or_method_is_dead() -> None:
    commands = {subcommand.target.partition(":")[2] for subcommand in SUBCOMMANDS}
    vulture = Vulture(ignore_decorators=LIBRARY_DECORATORS)  # to match the names at each definition takes half a minute
    folders = [str(ROOT / package) for package in (*PACKAGES, "examples", "tools", "tests")]
    vulture.scavenge(folders, exclude=["*node_modules*", "*/migrations/*"])
    unused = [item for item in vulture.get_unused_code() if item.typ in ("function", "class", "method", "property")]
    dead = [item for item in unused if item.name not in USED_FROM_OUTSIDE | commands]
    users = {ROOT / "examples", ROOT / "tests"}
    ours = [item for item in dead if users.isdisjoint(Path(item.filename).parents)]
    assert [_at(Path(item.filename), item.name) for item in ours] == []


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: the tracked files are unknown")
def test_no_file_names_a_path_of_one_machine_or_the_host_of_a_registry() -> None:
    # Joined here, so that this file does not match itself.
    hosts = ["py" + r"pi\.org", "deb" + r"\.debian", "registry" + r"\.npmjs"]
    pattern = re.compile("|".join(["/" + "work/", "/" + "root/", *hosts]))
    for path in _tracked():
        if path.suffix in (".gz", ".png") or path.name == "LICENSE":
            continue
        found = pattern.search(path.read_text(errors="replace"))
        assert not found, _at(path, found)
