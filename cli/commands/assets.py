"""`ebbtide assets`: files for other programs, which come with the package.

In the source tree, `cli/assets` links to the files of the Helm chart and of `deploy`, so each exists once. A wheel has
copies of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from cli.exit_codes import InputError
from cli.output import OutputFormat, OutputOption, print_document, render_table

ASSETS = Path(__file__).resolve().parents[1] / "assets"
FOLDERS = {
    "crds": "custom resource definitions: kubectl apply -k DIR/crds",
    "dashboards": "Grafana dashboards",
    "alerts": "Prometheus alert rules",
    "systemd": "systemd units of the service and of the node agent",
}
"""Folders of the export, each with what it holds."""

app = typer.Typer(
    name="assets",
    help="Export custom resource definitions, dashboards, alert rules and systemd units.",
    no_args_is_help=True,
)
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to. It may exist already.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that differ.")]


@app.callback()
def assets() -> None:
    """Export custom resource definitions, dashboards, alert rules and systemd units."""


@app.command("export")
def export(folder: FolderArgument, force: ForceOption = False, output: OutputOption = OutputFormat.TABLE) -> None:
    """Write the files to a folder, as this version of Ebbtide needs them."""
    sources = [path for name in FOLDERS for path in sorted((ASSETS / name).iterdir()) if path.is_file()]
    files = {path: folder / path.relative_to(ASSETS) for path in sources}
    differing = [target for source, target in files.items() if target.exists() and not _is_same(source, target)]
    if differing and not force:
        names = ", ".join(map(str, differing))
        raise InputError(f"DIR: {names} exist with other content. Choose another folder, or replace them with --force")
    for source, target in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    document = {"dir": str(folder), "files": [str(path.relative_to(ASSETS)) for path in sources]}
    counts = {name: str(sum(path.parent.name == name for path in sources)) for name in FOLDERS}
    rows = [(str(folder / name), counts[name], content) for name, content in FOLDERS.items()]
    headers = ("folder", "files", "content")
    print_document(document, output, lambda: render_table(rows, headers=headers, right_aligned=("files",)))


def _is_same(source: Path, target: Path) -> bool:
    return target.is_file() and target.read_bytes() == source.read_bytes()
