import errno
import json
import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from scheduler.domain.observation import RankStatus
from scheduler.domain.parallel_plan import plan_to_json
from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import (
    BatchChange,
    TrainingPosition,
    checkpoint_path,
    find_latest_manifest,
    list_checkpoint_steps,
)
from scheduler.trainer.checkpoint_storage import PieceReader
from scheduler.trainer.layout import make_data_parallel_plan
from scheduler.trainer.model import SIZES, build_gpt
from scheduler.trainer.optimizer import BatchScalingRule
from scheduler.trainer.trainer import TrainerSettings, train
from scheduler.worker.environment import RankEnvironment
from scheduler.worker.session import Session

SETTINGS = TrainerSettings(model="nano-gpt", steps=4, global_batch=2, seed=1)


def _environment(root: Path) -> RankEnvironment:
    run_dir = root / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    return RankEnvironment(run_dir=run_dir, checkpoint_dir=root / "checkpoints")


def _train(environment: RankEnvironment, settings: TrainerSettings = SETTINGS) -> RankStatus:
    with Session(environment) as session:
        train(session, settings)
    return session.status


def _losses(directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (directory / "losses-g0.jsonl").read_text().splitlines()]


def test_a_training_ends_saved_and_a_second_start_finds_nothing_to_do(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    for _ in range(2):
        status = _train(environment)
        assert (status.phase, status.step, status.checkpoint_step) == ("succeeded", 4, 4)
        assert list_checkpoint_steps(tmp_path / "checkpoints") == [4]


def test_more_steps_go_on_where_the_checkpoint_stands(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _train(_environment(whole), replace(SETTINGS, ledger_dir=whole, steps=6))
    for steps in (4, 6):
        _train(_environment(parts), replace(SETTINGS, ledger_dir=parts, steps=steps))
    assert _losses(parts) == _losses(whole)


def test_a_notice_before_the_first_step_leaves_with_nothing_to_save(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    assert environment.run_dir is not None
    (environment.run_dir / "notice.json").write_text(json.dumps({"action": "leave"}))
    status = _train(environment)
    assert (status.phase, status.step, status.checkpoint_step) == ("left", 0, None)
    assert list_checkpoint_steps(tmp_path / "checkpoints") == []


def test_a_request_to_checkpoint_before_the_first_step_changes_no_loss(tmp_path: Path) -> None:
    asked, plain = tmp_path / "asked", tmp_path / "plain"
    environment = _environment(asked)
    assert environment.run_dir is not None
    (environment.run_dir / "notice.json").write_text(json.dumps({"action": "checkpoint"}))
    _train(environment, replace(SETTINGS, ledger_dir=asked))
    _train(_environment(plain), replace(SETTINGS, ledger_dir=plain))
    assert _losses(asked) == _losses(plain)


def test_going_on_from_an_older_checkpoint_than_the_job_has_saved_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = _environment(tmp_path)
    _train(environment, replace(SETTINGS, checkpoint_every=1))
    _train(replace(environment, checkpoint_step=4))
    assert "done again" not in caplog.text
    (checkpoint_path(tmp_path / "checkpoints", 4) / "__0_0.distcp").unlink()
    status = _train(replace(environment, checkpoint_step=4))
    assert (status.phase, status.step) == ("succeeded", 4)
    assert (
        "this job has saved step 4, but the newest whole checkpoint is of step 3: 1 steps are done again" in caplog.text
    )


def test_what_a_killed_save_has_left_goes_at_the_next_start_and_a_finished_one_that_lost_a_file_stays(
    tmp_path: Path,
) -> None:
    environment, root = _environment(tmp_path), tmp_path / "checkpoints"
    _train(environment, replace(SETTINGS, steps=2))
    shutil.copytree(checkpoint_path(root, 2), checkpoint_path(root, 7))
    (checkpoint_path(root, 7) / "__0_0.distcp").unlink()
    shutil.copytree(checkpoint_path(root, 2), checkpoint_path(root, 6))
    (checkpoint_path(root, 6) / "manifest.json").unlink()
    _train(environment, SETTINGS)
    assert list_checkpoint_steps(root) == [7, 4, 2], "on a full disk it would have taken the room of every later save"


def test_regular_checkpoints_are_made_and_the_last_ones_kept(tmp_path: Path) -> None:
    _train(_environment(tmp_path), replace(SETTINGS, checkpoint_every=1, keep=3))
    assert list_checkpoint_steps(tmp_path / "checkpoints") == [4, 3, 2]


def test_checkpoints_are_made_and_kept_as_the_job_says(tmp_path: Path) -> None:
    often = replace(_environment(tmp_path), checkpoint_interval_s=1e-6, checkpoint_keep=3)
    _train(often)
    assert list_checkpoint_steps(tmp_path / "checkpoints") == [4, 3, 2]


def test_the_batch_of_the_plan_is_the_default_and_another_one_must_fit_its_micro_batches(tmp_path: Path) -> None:
    plan = replace(make_data_parallel_plan(replicas=1, global_batch=3), micro_batches=2)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(plan)))
    environment = replace(_environment(tmp_path), plan_path=path)
    with pytest.raises(ValueError, match="global batch is 5, it must be a multiple of the plan's 2 micro-batches"):
        _train(environment, replace(SETTINGS, global_batch=5))
    _train(environment, replace(SETTINGS, global_batch=0, ledger_dir=tmp_path))
    first = json.loads((tmp_path / "samples-g0-r0.jsonl").read_text().splitlines()[0])
    assert first == {"step": 1, "samples": [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(SETTINGS, steps=0), "steps is 0: give --steps or EBBTIDE_STEPS"),
        (replace(SETTINGS, model="gpt-9"), "model is 'gpt-9'"),
        (replace(SETTINGS, dtype="int8"), "dtype is 'int8', allowed are float32, float64"),
        (replace(SETTINGS, freeze=((1, 2), (3, 3))), "freeze is 3, it must be at most 2, the blocks of nano-gpt"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_reason_in_the_status(
    tmp_path: Path, settings: TrainerSettings, message: str
) -> None:
    environment = _environment(tmp_path)
    with pytest.raises(ValueError, match=message):
        _train(environment, settings)
    status = json.loads((tmp_path / "run" / "status-0.json").read_text())
    assert status["phase"] == "failed"
    assert message in status["reason"]


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a lower --learning-rate may help"):
        _train(_environment(tmp_path), replace(SETTINGS, learning_rate=1e30))


def test_a_changed_batch_is_refused_without_a_rule_and_recorded_with_one(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    _train(environment)
    wider = replace(SETTINGS, steps=6, global_batch=8)
    with pytest.raises(ValueError, match="global_batch is 8, the training's was 2"):
        _train(environment, wider)
    _train(environment, replace(wider, batch_rule=BatchScalingRule.SQUARE_ROOT))
    found = find_latest_manifest(tmp_path / "checkpoints")
    assert found is not None
    assert found.position == TrainingPosition(step=6, samples=4 * 2 + 2 * 8)
    assert found.batch_changes == (BatchChange(4, 2, 8, "sqrt", 2.0),)


def test_a_resumed_training_goes_on_with_the_rate_of_its_changed_batch(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    wider = replace(SETTINGS, steps=8, global_batch=8, batch_rule=BatchScalingRule.LINEAR)
    for root, stops in ((whole, (8,)), (parts, (6, 8))):
        _train(_environment(root), SETTINGS)
        for steps in stops:
            _train(_environment(root), replace(wider, steps=steps, ledger_dir=root))
    assert _losses(parts) == _losses(whole)


def test_frozen_blocks_and_their_embedding_learn_no_more_and_stay_frozen_after_a_restart(tmp_path: Path) -> None:
    settings = replace(SETTINGS, freeze=((2, 1),), checkpoint_every=1, keep=9)
    for steps in (3, 5):
        _train(_environment(tmp_path), replace(settings, steps=steps))
    weights = {step: _weights(tmp_path / "checkpoints", step) for step in (2, 3, 5)}
    frozen = {name for name in weights[2] if torch.equal(weights[2][name], weights[5][name])}
    assert frozen == {name for name in weights[2] if name.startswith(("embedding.", "blocks.0."))}
    assert not torch.equal(weights[3]["head.norm.bias"], weights[5]["head.norm.bias"])
    found = find_latest_manifest(tmp_path / "checkpoints")
    assert found is not None
    assert found.position.frozen == 1


def test_freezing_in_a_restart_equals_freezing_in_one_go(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = replace(SETTINGS, freeze=((2, 1), (4, 2)), warmup_steps=3)
    _train(_environment(whole), replace(settings, ledger_dir=whole, steps=6))
    for steps in (3, 4, 6):
        _train(_environment(parts), replace(settings, ledger_dir=parts, steps=steps))
    assert _losses(parts) == _losses(whole)


def test_a_training_outlives_a_background_save_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(*_: object, **__: object) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        return failed

    monkeypatch.setattr(checkpoint, "async_save", full_disk)
    status = _train(_environment(tmp_path), replace(SETTINGS, checkpoint_every=1))
    assert (status.phase, status.step, status.checkpoint_step) == ("succeeded", 4, 4)
    assert "step-00000001 could not be saved: No space left on device" in caplog.text


def test_a_training_outlives_a_background_save_that_finds_no_room_for_its_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = _environment(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    checkpoint_path(tmp_path / "checkpoints", 1).write_text("a file in the way")
    status = _train(environment, replace(SETTINGS, checkpoint_every=1))
    assert (status.phase, status.step, status.checkpoint_step) == ("succeeded", 4, 4)
    assert "step-00000001 could not be saved: Not a directory" in caplog.text


def test_the_control_plane_hears_of_blocks_when_they_freeze_and_after_a_checkpoint_that_knows_more(
    tmp_path: Path,
) -> None:
    environment = _environment(tmp_path)
    settings = replace(SETTINGS, freeze=((2, 1),), checkpoint_every=1)
    assert _train(environment, replace(settings, steps=2)).frozen_layers is None
    assert _train(environment, replace(settings, steps=3)).frozen_layers == 1
    assert _train(environment, replace(SETTINGS, steps=5)).frozen_layers == 1
    told = replace(environment, frozen_layers=1)
    assert _train(told, replace(SETTINGS, steps=6)).frozen_layers is None


def test_what_the_control_plane_knows_to_be_frozen_is_frozen_whatever_the_checkpoint_says(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    _train(environment, replace(SETTINGS, steps=2))
    _train(replace(environment, frozen_layers=1), replace(SETTINGS, steps=4))
    before, after = (_weights(tmp_path / "checkpoints", step) for step in (2, 4))
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    assert frozen == {name for name in before if name.startswith(("embedding.", "blocks.0."))}
    found = find_latest_manifest(tmp_path / "checkpoints")
    assert found is not None
    assert found.position.frozen == 1


def test_all_blocks_may_be_frozen_from_the_first_step_on_and_the_head_learns(tmp_path: Path) -> None:
    environment = replace(_environment(tmp_path), frozen_layers=2)
    _train(environment, replace(SETTINGS, checkpoint_every=1))
    before, after = (_weights(tmp_path / "checkpoints", step) for step in (3, 4))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith("head.")
    }


def test_blocks_frozen_from_the_start_by_an_option_learn_as_those_that_the_control_plane_knows_of(
    tmp_path: Path,
) -> None:
    option, told = tmp_path / "option", tmp_path / "told"
    status = _train(_environment(option), replace(SETTINGS, freeze=((0, 1),), ledger_dir=option))
    _train(replace(_environment(told), frozen_layers=1), replace(SETTINGS, ledger_dir=told))
    assert _losses(option) == _losses(told)
    assert status.frozen_layers == 1


def test_more_frozen_layers_than_the_model_has_blocks_are_refused(tmp_path: Path) -> None:
    environment = replace(_environment(tmp_path), frozen_layers=3)
    with pytest.raises(ValueError, match="EBBTIDE_FROZEN_LAYERS is 3, it must be at most 2, the blocks of nano-gpt"):
        _train(environment)


def _weights(root: Path, step: int) -> dict[str, torch.Tensor]:
    model = build_gpt(SIZES["nano-gpt"], seed=0, dtype=torch.float32)
    state = {"model": model.state_dict()}
    with Session(RankEnvironment()) as session:
        session.init_process_group()
        load(state, storage_reader=PieceReader(checkpoint_path(root, step), node="t0"))
        session.succeed()
    return state["model"]
