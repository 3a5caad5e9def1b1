"""The trainer's command line: what cannot be is refused before anything is trained."""

from __future__ import annotations

import sys

import pytest

from scheduler.trainer import train


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "0"], "argument --keep: '0' is not a whole number of at least 1"),
        (["--checkpoint-every", "-1"], "argument --checkpoint-every: '-1' is not a whole number of at least 0"),
        (["--global-batch", "2.5"], "argument --global-batch: '2.5' is not a whole number of at least 0"),
        (["--freeze", "4"], "argument --freeze: '4' is not STEP:BLOCKS,..."),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *options])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert message in capsys.readouterr().err
