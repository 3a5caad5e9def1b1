"""Parsing of the environment variables of pod agents."""

from pathlib import Path

import pytest

from scheduler.worker.environment import read_pod_environment

POD_VARIABLES = {
    "EBBTIDE_JOB_ID": "train-abc",
    "EBBTIDE_NODE": "n0",
    "EBBTIDE_URL": "http://api:8787/",
    "EBBTIDE_TOKEN": "eba_x",
    "EBBTIDE_RUN_ROOT": "/run/ebbtide",
}


def test_optional_pod_variables_have_defaults() -> None:
    environment = read_pod_environment(POD_VARIABLES)
    assert environment.url == "http://api:8787"
    assert environment.read_token() == "eba_x"
    assert environment.checkpoint_dir == ""
    assert environment.grace_s == 30.0
    assert environment.pod
    assert environment.pod != read_pod_environment(POD_VARIABLES).pod
    assert read_pod_environment({**POD_VARIABLES, "EBBTIDE_POD": "uid-7", "EBBTIDE_GRACE_S": "5"}).pod == "uid-7"


def test_token_file_is_read_for_each_use(tmp_path: Path) -> None:
    path = tmp_path / "token"
    environment = read_pod_environment({**POD_VARIABLES, "EBBTIDE_TOKEN": "", "EBBTIDE_TOKEN_FILE": str(path)})
    for token in ("eba_1", "eba_2"):
        path.write_text(f"{token}\n")
        assert environment.read_token() == token


@pytest.mark.parametrize("name", sorted(POD_VARIABLES))
def test_missing_pod_variable_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is not set"):
        read_pod_environment({key: value for key, value in POD_VARIABLES.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [("EBBTIDE_URL", "api:8787"), ("EBBTIDE_GRACE_S", "soon"), ("EBBTIDE_GRACE_S", "-1"), ("EBBTIDE_GRACE_S", "inf")],
)
def test_malformed_pod_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is '{value}'"):
        read_pod_environment({**POD_VARIABLES, name: value})
