"""What an agent does before it serves, with a control plane that is not there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from scheduler.agent import daemon
from scheduler.agent.agent_state import AgentIdentity, StatedFacts
from scheduler.agent.daemon import AgentOptions, run_agent
from scheduler.agent.joining import AgentFacts
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.shared_files import write_json
from tests.agent.runs import python_job


class IdleAgent:
    """Takes the place of MachineAgent and serves nothing."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        pass

    def serve(self) -> None:
        pass


def test_restart_neither_extends_the_lease_nor_forgets_what_was_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[AgentFacts] = []

    def send(_identity: AgentIdentity, facts: AgentFacts) -> str:
        sent.append(facts)
        return ""

    monkeypatch.setattr(daemon, "MachineAgent", IdleAgent)
    monkeypatch.setattr(daemon, "send_facts", send)
    identity = AgentIdentity("m1", ("m1",), "http://127.0.0.1:9", "ebm_x")
    write_json(tmp_path / "identity.json", asdict(identity))
    write_json(tmp_path / "stated.json", asdict(StatedFacts(2, "cpu", 1 << 30)))
    (tmp_path / "lease").write_text("5.0")
    AgentFolders(tmp_path).folder("job", 1, "m1").create(python_job("pass"))
    run_agent(AgentOptions(tmp_path, "0.1.1"))
    assert [(facts.version, facts.gpu, len(facts.inventory.gpus)) for facts in sent] == [("0.1.1", "cpu", 2)]
    assert (tmp_path / "lease").read_text() == "5.0"
