"""Real ranks read the plan of their generation in the words of their framework."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest

from scheduler.agent.supervised_run import SupervisedPhase, SupervisedRun
from scheduler.domain.parallel_plan import LayerStrategy
from tests.agent.requirements import needs_bubblewrap
from tests.agent.runs import TestMachine, python_job, read_output
from tests.builders_plan_export import build_plan

pytestmark = needs_bubblewrap

SCRIPT = """
    import json, sys
    with open(sys.argv[1]) as file:
        config = json.load(file)
    print(json.dumps([config["zero_optimization"]["stage"], config["train_batch_size"], sys.argv[2]]))
"""


def test_each_generation_gets_its_own_plan(machine: TestMachine) -> None:
    job = python_job(dedent(SCRIPT))
    job = replace(job, framework="deepspeed", command=(*job.command, "{plan.file}", "--dp={plan.dp}"))
    for generation, replicas in ((1, 2), (2, 4)):
        plan = build_plan(4, strategy=LayerStrategy(1, dp=replicas, zero=3, shard_group=replicas))
        run, state = machine.finish(replace(job, generation=generation, plan=plan))
        assert state.phase is SupervisedPhase.ENDED
        assert state.exit_codes == {0: 0}
        assert read_output(run) == [3, plan.global_batch, f"--dp={replicas}"]


def test_a_plan_that_the_framework_cannot_express_is_a_failed_run(machine: TestMachine) -> None:
    job = replace(python_job("pass"), framework="deepspeed", plan=build_plan(2, 2))
    with pytest.raises(ValueError, match="DeepSpeed cannot express pp2"):
        machine.prepare(job)
    run = SupervisedRun.record_failure(job, machine.folders.folder(job.job_id, 1, job.node), "cannot express")
    assert run.poll().has_ended
    run.settle()
