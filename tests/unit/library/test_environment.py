"""Parsing of the environment variables of ranks."""

from pathlib import Path

import pytest

from ebbtide.environment import RankEnvironment, read_rank_environment


def test_empty_environment_gives_a_single_rank_without_executor() -> None:
    assert read_rank_environment({}) == RankEnvironment()
    assert read_rank_environment({"EBBTIDE_URL": "", "EBBTIDE_RUN_DIR": "", "RANK": ""}) == RankEnvironment()


def test_every_variable_of_the_contract_is_read() -> None:
    environment = read_rank_environment(
        {
            "RANK": "2",
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "4711",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "EBBTIDE_NODE": "t1",
            "EBBTIDE_JOB_ID": "job-7",
            "EBBTIDE_GENERATION": "5",
            "EBBTIDE_URL": "http://localhost:8000/",
            "EBBTIDE_TOKEN": "secret",
            "EBBTIDE_PLAN": "plan.json",
            "EBBTIDE_CHECKPOINT_DIR": "checkpoints",
            "EBBTIDE_RUN_DIR": "run",
            "EBBTIDE_STEPS": "300",
            "EBBTIDE_FROZEN_LAYERS": "7",
            "EBBTIDE_CHECKPOINT_STEP": "120",
            "EBBTIDE_CHECKPOINT_INTERVAL_S": "900.0",
            "EBBTIDE_CHECKPOINT_KEEP": "3",
        }
    )
    assert environment == RankEnvironment(
        rank=2,
        world_size=3,
        local_rank=1,
        node="t1",
        store_host="127.0.0.1",
        store_port=4711,
        uses_agent_store=True,
        job_id="job-7",
        generation=5,
        url="http://localhost:8000",
        token="secret",
        plan_path=Path("plan.json"),
        checkpoint_dir=Path("checkpoints"),
        run_dir=Path("run"),
        steps_total=300,
        frozen_layers=7,
        checkpoint_step=120,
        checkpoint_interval_s=900.0,
        checkpoint_keep=3,
    )


def test_repr_hides_the_token() -> None:
    assert "secret" not in repr(read_rank_environment({"EBBTIDE_TOKEN": "secret"}))


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        ({"RANK": "one"}, "RANK", "'one'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "'0'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK", "2"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR", "not set"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_PORT", "0"),
        ({"EBBTIDE_STEPS": "-3"}, "EBBTIDE_STEPS", "'-3'"),
        ({"EBBTIDE_CHECKPOINT_INTERVAL_S": "0"}, "EBBTIDE_CHECKPOINT_INTERVAL_S", "'0'"),
        ({"EBBTIDE_CHECKPOINT_INTERVAL_S": "soon"}, "EBBTIDE_CHECKPOINT_INTERVAL_S", "'soon'"),
        ({"EBBTIDE_URL": "file:///etc"}, "EBBTIDE_URL", "'file:///etc'"),
    ],
)
def test_malformed_rank_variable_is_named_with_its_value(variables: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is {value}"):
        read_rank_environment(variables)
