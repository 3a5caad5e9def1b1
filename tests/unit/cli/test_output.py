"""Output formats: only the result is on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import yaml
from rich.text import Text
from typer.testing import Result

from cli.output import OutputFormat, make_console, print_document, render_facts, render_table

Run = Callable[..., Result]


@pytest.mark.parametrize("words", [("version",), ("simulate", "--policy", "list")], ids=" ".join)
def test_json_and_yaml_are_equal_and_alone_on_stdout(run: Run, words: tuple[str, ...]) -> None:
    as_json, as_yaml, as_table = (run(*words, "-o", form) for form in ("json", "yaml", "table"))
    assert {result.exit_code for result in (as_json, as_yaml, as_table)} == {0}
    assert json.loads(as_json.stdout) == yaml.safe_load(as_yaml.stdout)
    assert as_table.stdout == run(*words).stdout
    assert as_json.stderr == ""


def test_infinity_and_nan_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"inf": float("inf"), "nan": [float("nan")], "list": ({"x": 1.5},)}
    for form, read in ((OutputFormat.JSON, json.loads), (OutputFormat.YAML, yaml.safe_load)):
        print_document(document, form, Text)
        assert read(capsys.readouterr().out) == {"inf": None, "nan": [None], "list": [{"x": 1.5}]}


def test_table_does_not_interpret_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_document(None, OutputFormat.TABLE, lambda: render_table([["[red]t0[0-3]", "[/x]"]], headers=["node", "x"]))
    print_document(None, OutputFormat.TABLE, lambda: render_facts({"on": "[bold]t0[0,2]"}))
    printed = capsys.readouterr().out
    assert "[red]t0[0-3]" in printed
    assert "[/x]" in printed
    assert "[bold]t0[0,2]" in printed


def test_empty_table_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    print_document(None, OutputFormat.TABLE, lambda: render_table([], headers=["job"], empty="There are no jobs."))
    assert capsys.readouterr().out == "There are no jobs.\n"


def test_table_is_100_columns_wide_without_a_terminal() -> None:
    assert make_console().width == 100
