"""An integration names the framework that it needs."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import ebbtide.integrations


@pytest.mark.parametrize("name", ebbtide.integrations.__all__)
def test_a_missing_framework_is_named_when_its_integration_is_imported(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(ebbtide.integrations, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, f"ebbtide.integrations.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install {name}") as raised:
        getattr(ebbtide.integrations, name)
    assert raised.value.name == name
    assert len(str(raised.value).splitlines()) == 1


def test_an_unknown_integration_is_no_attribute() -> None:
    with pytest.raises(AttributeError):
        ebbtide.integrations.__getattr__("keras")
    assert importlib.util.find_spec("ebbtide.integrations.keras") is None
