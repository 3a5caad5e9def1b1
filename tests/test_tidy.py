"""House rules that no linter knows: sizes, purity below `runtime`, the import law, nothing of one machine."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for top in ("scheduler", "api") for path in (ROOT / top).rglob("*.py"))
CONSOLE = ROOT / "api" / "console" / "static"
SCRIPTS, STYLES = sorted(CONSOLE.rglob("*.js")), sorted(CONSOLE.rglob("*.css"))
PURE = ("domain", "solver", "forecast", "resharding", "policies", "core")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
POSITIONAL_MAX = 5
TOTAL_LINES_MAX = 46_000
CONSOLE_LINES_MAX = 3_200
COLUMNS_MAX = 120
HEART = ("domain", "policies", "core", "runtime", "store", "executors")
HEART_LINES_MAX = 12_800
SPACE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
_BEGINS_FUNCTION = re.compile(r"(\bfunction\b.*|^ +(?:async |#|static )*\w+\([^;]*\) |=> )\{$")
BANNED_NAMES = {"utils", "helpers", "common", "misc", "manager"}
BANNED_CALLS = {
    "time.time", "time.monotonic", "time.perf_counter", "time.sleep", "datetime.now", "datetime.utcnow",
    "date.today", "uuid4", "uuid.uuid4", "uuid.uuid1", "print", "os.urandom",
}  # fmt: skip


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _at(path: Path, what: object) -> str:
    return f"{path.relative_to(ROOT)}: {what}"


def test_a_file_fits_into_a_head() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (*SOURCES, *SCRIPTS, *STYLES)}
    assert [_at(path, lines) for path, lines in lengths.items() if lines > FILE_LINES_MAX] == []


def test_a_line_of_the_console_is_no_longer_than_one_of_python() -> None:
    for path in (*SCRIPTS, *STYLES):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= COLUMNS_MAX, _at(path, f"line {number}: {len(line)} columns")


def test_a_function_fits_onto_a_screen() -> None:
    for path in SOURCES:
        for function in _functions(path):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, _at(path, function.name)


def _functions_of_script(path: Path) -> Iterator[tuple[str, int]]:
    """The first line of each block that a function, method or arrow begins, and how many lines it has: scripts are
    indented, so that a block ends with the first brace that stands as far out as its beginning."""
    lines = path.read_text().splitlines()
    for at, line in enumerate(lines):
        if _BEGINS_FUNCTION.search(line):
            end = " " * (len(line) - len(line.lstrip(" "))) + "}"
            yield line.strip(), next(to for to, later in enumerate(lines[at + 1 :], 2) if later.startswith(end))


def test_a_function_of_the_console_fits_onto_a_screen_too() -> None:
    for path in SCRIPTS:
        for name, lines in _functions_of_script(path):
            assert lines <= FUNCTION_LINES_MAX, _at(path, name)


def test_scripts_and_styles_say_what_they_are_and_put_no_text_in_as_markup() -> None:
    for path in (*SCRIPTS, *STYLES):
        text = path.read_text()
        assert text.startswith(("// ", "/* ")), _at(path, "begins without a comment")
        assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(", text), _at(path, "markup")


def test_a_function_has_few_positional_parameters() -> None:
    for path in SOURCES:
        for function in _functions(path):
            names = {arg.arg for arg in (*function.args.posonlyargs, *function.args.args)} - {"self", "cls"}
            assert len(names) <= POSITIONAL_MAX, _at(path, function.name)


def test_a_module_has_a_name_of_its_own_and_says_what_it_is() -> None:
    for path in SOURCES:
        assert path.stem not in BANNED_NAMES, _at(path, path.stem)
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), _at(path, "begins without a docstring")


def test_below_runtime_nothing_reads_a_clock_or_draws_at_random() -> None:
    for path in SOURCES:
        if path.relative_to(ROOT).parts[1] not in PURE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                drawn = called.startswith(("random.", "np.random.")) and called != "np.random.Generator"
                impure = drawn or called in BANNED_CALLS
                assert not impure, _at(path, f"line {node.lineno}: {called}")


def _lines_of_code(path: Path) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    source = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SPACE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def _lines_of_script(path: Path) -> int:
    stripped = (line.strip() for line in path.read_text().splitlines())
    return sum(1 for line in stripped if line and not line.startswith(("//", "/*", "*")))


def test_the_whole_stays_small_enough_to_be_read() -> None:
    lines = {path: _lines_of_code(path) for path in SOURCES}
    assert sum(lines.values()) <= TOTAL_LINES_MAX
    assert sum(_lines_of_script(path) for path in (*SCRIPTS, *STYLES)) <= CONSOLE_LINES_MAX
    heart = [count for path, count in lines.items() if path.relative_to(ROOT).parts[1] in HEART]
    assert sum(heart) <= HEART_LINES_MAX


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: which files are ours is not known")
def test_nothing_names_a_path_of_one_machine_or_the_host_of_a_registry() -> None:
    # Put together here, so that this file does not match itself.
    hosts = ["py" + r"pi\.org", "deb" + r"\.debian", "registry" + r"\.npmjs"]
    pattern = re.compile("|".join(["/" + "work/", "/" + "root/", *hosts]))
    for path in _tracked():
        if path.suffix in (".gz", ".png") or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
