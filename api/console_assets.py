"""Files of the console, and its modules and styles inlined for pages that open without a server.

Report files draw the console's charts. They contain the same modules, joined into one script when the file is written:
the repository has no second copy and no build step.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CONSOLE_FOLDER = Path(__file__).parent / "console"
STATIC_FOLDER = CONSOLE_FOLDER / "static"
_CHARTS = CONSOLE_FOLDER / "node_modules" / "uplot"
CHART_FILES = {"charts.js": _CHARTS / "dist" / "uPlot.iife.min.js", "charts.css": _CHARTS / "dist" / "uPlot.min.css"}
_REPORT_ENTRY = "report.js"
_REPORT_STYLES = ("tokens.css", "base.css", "parts.css", "drawings.css", "report.css")

_IMPORT = re.compile(r'^import \{([^}]+)\} from "\./([\w/]+\.js)";\n', re.MULTILINE)
_DOCUMENTATION = re.compile(r"^ */\*\*.*?\*/\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)
_UNSUPPORTED = re.compile(r"^(?:import|export)\b.*|.*\bimport\(.*|.*</script.*", re.MULTILINE | re.IGNORECASE)


class MissingChartLibraryError(Exception):
    """uPlot is not installed, so charts cannot be drawn."""

    def __init__(self) -> None:
        super().__init__("report pages need uPlot, which is not installed. Run `npm ci` in api/console.")


@dataclass(frozen=True, slots=True)
class ReportAssets:
    """Script and style of report files. `content_security_policy` permits exactly these two."""

    script: str
    style: str

    @property
    def content_security_policy(self) -> str:
        script, style = (_hash_source(text) for text in (self.script, self.style))
        return f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; form-action 'none'"


@cache
def load_report_assets() -> ReportAssets:
    """Return the assets of report files.

    Raises:
        MissingChartLibraryError: the chart library is not installed.
    """
    if not all(path.is_file() for path in CHART_FILES.values()):
        raise MissingChartLibraryError
    license_text = (_CHARTS / "LICENSE").read_text(encoding="utf-8").strip()
    library, library_style = (path.read_text(encoding="utf-8") for path in CHART_FILES.values())
    script = f"/*\nuPlot\n\n{license_text}\n*/\n{library}\n{join_modules(STATIC_FOLDER, _REPORT_ENTRY)}"
    styles = [(STATIC_FOLDER / name).read_text(encoding="utf-8") for name in _REPORT_STYLES]
    return ReportAssets(script, "\n".join([library_style, *styles]))


def join_modules(folder: Path, entry: str) -> str:
    """Return one script that runs the module `entry` with all modules that it imports, each in a scope of its own.

    Supports the forms that the console uses: named imports from `./name.js`, and exported functions, classes and
    constants.

    Raises:
        ValueError: a module uses another form, imports itself, or contains an end tag of a script.
    """
    scopes: dict[str, str] = {}
    _add_module(folder, (entry,), scopes)
    return "\n".join(['"use strict";', *scopes.values()])


def _add_module(folder: Path, path: tuple[str, ...], scopes: dict[str, str]) -> None:
    """Append the scopes of a module's imports, then its own. `path` leads from the entry to the module."""
    *importers, name = path
    if name in scopes:
        return
    if name in importers:
        raise ValueError(f"modules import each other: {' -> '.join(path)}")
    source = (folder / name).read_text(encoding="utf-8")
    for _, imported in _IMPORT.findall(source):
        _add_module(folder, (*path, imported), scopes)
    scopes[name] = _wrap_module(name, source)


def _wrap_module(name: str, source: str) -> str:
    """Return the module as a constant with its exports."""
    exports = [exported for _, exported in _EXPORT.findall(source)]
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(_replace_import, _DOCUMENTATION.sub("", source)))
    if found := _UNSUPPORTED.search(body):
        raise ValueError(f"{name}: `{found[0].strip()}` cannot be inlined in a report file")
    return f"const {_name_scope(name)} = (() => {{\n{body}return {{ {', '.join(exports)} }};\n}})();"


def _replace_import(found: re.Match[str]) -> str:
    names = ", ".join(each.strip().replace(" as ", ": ") for each in found[1].split(",") if each.strip())
    return f"const {{ {names} }} = {_name_scope(found[2])};\n"


def _name_scope(module: str) -> str:
    return f"module_{re.sub(r'[^a-z0-9]', '_', module.removesuffix('.js'))}"


def render_data_block(data: Any) -> str:
    """Return JSON that is safe inside a script element, whatever texts it contains."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _hash_source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
