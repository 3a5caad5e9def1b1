"""CSV files, plain or gzipped, read row by row with errors that name file, line and field."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


class TraceError(ValueError):
    """An invalid trace or profile. The message names the file, line, field, value and allowed values."""


@dataclass(frozen=True, slots=True)
class CsvRow:
    """One row of text cells by column name."""

    path: Path
    line: int
    texts: Mapping[str, str]

    def cell_error(self, field: str, allowed: str) -> TraceError:
        value = self.texts.get(field, "")
        return TraceError(f"{self.path} line {self.line}: {field}: got {value[:80]!r}; allowed: {allowed}")

    def has(self, field: str) -> bool:
        return bool(self.texts.get(field))

    def text(self, field: str) -> str:
        if not self.has(field):
            raise self.cell_error(field, "text; the field is required")
        return self.texts[field]

    def number(self, field: str, *, above: float | None = None) -> float:
        form = "a finite number, 0 or more" if above is None else f"a finite number above {above:g}"
        try:
            value = float(_reject_underscores(self.texts.get(field, "")))
        except ValueError:
            raise self.cell_error(field, form) from None
        if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
            raise self.cell_error(field, form)
        return value

    def integer(self, field: str, *, minimum: int) -> int:
        form = f"an integer, {minimum} or more"
        try:
            value = int(_reject_underscores(self.texts.get(field, "")))
        except ValueError:
            raise self.cell_error(field, form) from None
        if value < minimum:
            raise self.cell_error(field, form)
        return value


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file with its header. `rows` iterates once over all rows that are not blank."""

    path: Path
    header: tuple[str, ...]
    rows: Iterator[CsvRow]

    def check_columns(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Check that all required columns exist and that no unknown ones do.

        Raises:
            TraceError: a column is missing or unknown.
        """
        columns = f"allowed: {', '.join(required)}" + (f"; optional: {', '.join(optional)}" if optional else "")
        for name in required:
            if name not in self.header:
                raise TraceError(f"{self.path} line 1: column {name!r} is missing; {columns}")
        for name in self.header:
            if name not in required and name not in optional:
                raise TraceError(f"{self.path} line 1: column {name!r} is unknown; {columns}")


def open_table(path: Path) -> CsvTable:
    """Open the file at `path` and read its header.

    Raises:
        TraceError: the file cannot be read, or a column is duplicated. Iterating over the rows raises it as well.
    """
    lines = _read_lines(path)
    _, cells = next(lines, (1, []))
    header = tuple(name.strip() for name in cells)
    if not any(header):
        raise TraceError(f"{path} line 1: is empty; allowed: a header with column names")
    for at, name in enumerate(header):
        if name in header[:at]:
            raise TraceError(f"{path} line 1: column {name!r} is duplicated; use each column once")
    return CsvTable(path, header, _iterate_rows(path, header, lines))


def _iterate_rows(path: Path, header: tuple[str, ...], lines: Iterator[tuple[int, list[str]]]) -> Iterator[CsvRow]:
    for line, cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise TraceError(
                f"{path} line {line}: has {len(cells)} cells; allowed: {len(header)}, as many as the header"
            )
        yield CsvRow(path, line, dict(zip(header, map(str.strip, cells), strict=True)))


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    at = ""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="") as text
        ):
            reader = csv.reader(text, strict=True)
            at = " line 1"
            for cells in reader:
                yield reader.line_num, cells
                at = f" line {reader.line_num + 1}"
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}{at} or shortly after: is not UTF-8 text ({error.reason})") from None
    except (EOFError, csv.Error, zlib.error) as error:
        raise TraceError(f"{path}{at}: cannot be read: {error}") from None


def _reject_underscores(text: str) -> str:
    """Return the text of a number. Python accepts underscores between digits; CSV files must not have them."""
    if "_" in text:
        raise ValueError(text)
    return text
