"""The trainer's command line."""

from __future__ import annotations

import sys

import pytest

from scheduler.trainer import train


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (["--keep", "0"], "--keep", "'0'"),
        (["--checkpoint-every", "-1"], "--checkpoint-every", "'-1'"),
        (["--global-batch", "2.5"], "--global-batch", "'2.5'"),
        (["--freeze", "4"], "--freeze", "'4'"),
    ],
)
def test_invalid_option_is_rejected_with_its_name_and_value(
    options: list[str], name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *options])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    message = capsys.readouterr().err
    assert f"argument {name}: {value}" in message
