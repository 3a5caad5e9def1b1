"""Trainings of one rank in this process: checkpoints, settings, batch changes and freezing."""

import errno
import json
import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from ebbtide.environment import RankEnvironment
from ebbtide.session import Session
from scheduler.domain.observation import RankStatus
from scheduler.domain.parallel_plan import plan_to_json
from scheduler.trainer import checkpoint, training_state
from scheduler.trainer.checkpoint_manifest import (
    BatchChange,
    TrainingPosition,
    checkpoint_path,
    find_latest_manifest,
    list_checkpoint_steps,
)
from scheduler.trainer.engine import TrainingEngine
from scheduler.trainer.layout import make_data_parallel_plan
from scheduler.trainer.model import SIZES, build_gpt
from scheduler.trainer.optimizer import BatchScalingRule
from scheduler.trainer.settings import TrainerSettings
from scheduler.trainer.trainer import train

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


def test_checkpoint_of_a_rank_without_a_gpu_loads_on_one_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = _environment(tmp_path)
    _train(environment, replace(SETTINGS, steps=2))
    gpu_state = torch.arange(16, dtype=torch.uint8)
    states = {"cpu": torch.get_rng_state(), "cuda": gpu_state.clone()}
    monkeypatch.setattr(training_state, "_get_random_state", lambda: states)
    status = _train(environment, replace(SETTINGS, steps=2))
    assert (status.phase, status.checkpoint_step) == ("succeeded", 2)
    assert torch.equal(states["cuda"], gpu_state)


def test_finished_training_is_saved_and_a_restart_does_nothing(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    for _ in range(2):
        status = _train(environment)
        assert (status.phase, status.step, status.checkpoint_step) == ("succeeded", 4, 4)
        assert list_checkpoint_steps(tmp_path / "checkpoints") == [4]


def test_training_continues_from_the_checkpoint(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _train(_environment(whole), replace(SETTINGS, ledger_dir=whole, steps=6))
    for steps in (4, 6):
        _train(_environment(parts), replace(SETTINGS, ledger_dir=parts, steps=steps))
    assert _losses(parts) == _losses(whole)


def test_notice_before_the_first_step_leaves_without_a_checkpoint(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    assert environment.run_dir is not None
    (environment.run_dir / "notice.json").write_text(json.dumps({"action": "leave"}))
    status = _train(environment)
    assert (status.phase, status.step, status.checkpoint_step) == ("left", 0, None)
    assert list_checkpoint_steps(tmp_path / "checkpoints") == []


def test_checkpoint_request_before_the_first_step_changes_no_loss(tmp_path: Path) -> None:
    requested, plain = tmp_path / "requested", tmp_path / "plain"
    environment = _environment(requested)
    assert environment.run_dir is not None
    (environment.run_dir / "notice.json").write_text(json.dumps({"action": "checkpoint"}))
    _train(environment, replace(SETTINGS, ledger_dir=requested))
    _train(_environment(plain), replace(SETTINGS, ledger_dir=plain))
    assert _losses(requested) == _losses(plain)


def test_resuming_from_an_older_checkpoint_than_saved_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = _environment(tmp_path)
    _train(environment, replace(SETTINGS, checkpoint_every=1))
    _train(replace(environment, checkpoint_step=4))
    assert "newest complete checkpoint" not in caplog.text
    (checkpoint_path(tmp_path / "checkpoints", 4) / "__0_0.distcp").unlink()
    status = _train(replace(environment, checkpoint_step=4))
    assert (status.phase, status.step) == ("succeeded", 4)
    assert "saved step 4, but the newest complete checkpoint is of step 3" in caplog.text


def test_restart_deletes_unfinished_checkpoints_and_keeps_damaged_ones(
    tmp_path: Path,
) -> None:
    environment, root = _environment(tmp_path), tmp_path / "checkpoints"
    _train(environment, replace(SETTINGS, steps=2))
    shutil.copytree(checkpoint_path(root, 2), checkpoint_path(root, 7))
    (checkpoint_path(root, 7) / "__0_0.distcp").unlink()
    shutil.copytree(checkpoint_path(root, 2), checkpoint_path(root, 6))
    (checkpoint_path(root, 6) / "manifest.json").unlink()
    _train(environment, SETTINGS)
    assert list_checkpoint_steps(root) == [7, 4, 2], "an unfinished checkpoint would take the space of later saves"


def test_damaged_checkpoint_leads_to_the_previous_one_and_the_same_losses(tmp_path: Path) -> None:
    environment, whole = _environment(tmp_path), tmp_path / "whole"
    _train(_environment(whole), replace(SETTINGS, ledger_dir=whole, steps=6))
    _train(environment, replace(SETTINGS, checkpoint_every=1))
    file = checkpoint_path(tmp_path / "checkpoints", 4) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 16
    file.write_bytes(content)
    ledger = tmp_path / "ledger"
    status = _train(environment, replace(SETTINGS, ledger_dir=ledger, steps=6))
    assert (status.phase, status.step) == ("succeeded", 6)
    assert _losses(ledger) == _losses(whole)[3:], "continues from step 3"
    damaged = tmp_path / "checkpoints" / "step-00000004.damaged"
    assert damaged.is_dir()
    _train(environment, replace(SETTINGS, steps=7))
    assert not damaged.exists(), "checkpoints that are older than the ones to keep are deleted"


def test_checkpoint_after_which_the_loss_is_twice_non_finite_leads_to_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, root = _environment(tmp_path), tmp_path / "checkpoints"
    _train(environment, replace(SETTINGS, checkpoint_every=1))
    with monkeypatch.context() as patch:
        patch.setattr(TrainingEngine, "run_step", lambda *_, **__: float("nan"))
        for generation in (2, 3):
            with pytest.raises(ValueError, match="loss of step 5 is nan"):
                _train(replace(environment, generation=generation), replace(SETTINGS, steps=6))
            assert list_checkpoint_steps(root) == [4, 3]
    status = _train(replace(environment, generation=4), replace(SETTINGS, steps=3))
    assert (status.phase, status.step) == ("succeeded", 3)
    assert (root / "step-00000004.nonfinite").is_dir()


def test_checkpoint_every_and_keep_are_respected(tmp_path: Path) -> None:
    _train(_environment(tmp_path), replace(SETTINGS, checkpoint_every=1, keep=3))
    assert list_checkpoint_steps(tmp_path / "checkpoints") == [4, 3, 2]


def test_checkpoint_interval_and_keep_of_the_job_are_respected(tmp_path: Path) -> None:
    environment = replace(_environment(tmp_path), checkpoint_interval_s=1e-6, checkpoint_keep=3)
    _train(environment)
    assert list_checkpoint_steps(tmp_path / "checkpoints") == [4, 3, 2]


def test_global_batch_defaults_to_the_plan_and_must_fit_its_micro_batches(tmp_path: Path) -> None:
    plan = replace(make_data_parallel_plan(replicas=1, global_batch=3), micro_batches=2)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(plan)))
    environment = replace(_environment(tmp_path), plan_path=path)
    with pytest.raises(ValueError, match=r"`--global-batch` is 5.* 2 micro-batches"):
        _train(environment, replace(SETTINGS, global_batch=5))
    _train(environment, replace(SETTINGS, global_batch=0, ledger_dir=tmp_path))
    first = json.loads((tmp_path / "samples-g0-r0.jsonl").read_text().splitlines()[0])
    assert first == {"step": 1, "samples": [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (replace(SETTINGS, steps=0), "`--steps`"),
        (replace(SETTINGS, model="gpt-9"), "'gpt-9'"),
        (replace(SETTINGS, dtype="int8"), "`dtype` is 'int8'"),
        (replace(SETTINGS, freeze=((1, 2), (3, 3))), "`--freeze` freezes 3 blocks"),
    ],
)
def test_invalid_settings_are_rejected_and_the_status_has_the_reason(
    tmp_path: Path, settings: TrainerSettings, problem: str
) -> None:
    environment = _environment(tmp_path)
    with pytest.raises(ValueError, match=problem):
        _train(environment, settings)
    status = json.loads((tmp_path / "run" / "status-0.json").read_text())
    assert status["phase"] == "failed"
    assert problem in status["reason"]


def test_loss_that_is_not_a_number_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`--learning-rate`"):
        _train(_environment(tmp_path), replace(SETTINGS, learning_rate=1e30))


def test_changed_batch_needs_a_rule_and_is_recorded(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    _train(environment)
    wider = replace(SETTINGS, steps=6, global_batch=8)
    with pytest.raises(ValueError, match=r"8.* 2.*--batch-rule"):
        _train(environment, wider)
    _train(environment, replace(wider, batch_rule=BatchScalingRule.SQUARE_ROOT))
    manifest = find_latest_manifest(tmp_path / "checkpoints")
    assert manifest is not None
    assert manifest.position == TrainingPosition(step=6, samples=4 * 2 + 2 * 8)
    assert manifest.batch_changes == (BatchChange(4, 2, 8, "sqrt", 2.0),)


def test_resumed_training_keeps_the_scaled_learning_rate(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    wider = replace(SETTINGS, steps=8, global_batch=8, batch_rule=BatchScalingRule.LINEAR)
    for root, stops in ((whole, (8,)), (parts, (6, 8))):
        _train(_environment(root), SETTINGS)
        for steps in stops:
            _train(_environment(root), replace(wider, steps=steps, ledger_dir=root))
    assert _losses(parts) == _losses(whole)


def test_frozen_blocks_and_embedding_stay_frozen_after_a_restart(tmp_path: Path) -> None:
    settings = replace(SETTINGS, freeze=((2, 1),), checkpoint_every=1, keep=9)
    for steps in (3, 5):
        _train(_environment(tmp_path), replace(settings, steps=steps))
    weights = {step: _weights(tmp_path / "checkpoints", step) for step in (2, 3, 5)}
    frozen = {name for name in weights[2] if torch.equal(weights[2][name], weights[5][name])}
    assert frozen == {name for name in weights[2] if name.startswith(("embedding.", "blocks.0."))}
    assert not torch.equal(weights[3]["head.norm.bias"], weights[5]["head.norm.bias"])
    manifest = find_latest_manifest(tmp_path / "checkpoints")
    assert manifest is not None
    assert manifest.position.frozen == 1


def test_freezing_across_restarts_equals_freezing_in_one_run(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = replace(SETTINGS, freeze=((2, 1), (4, 2)), warmup_steps=3)
    _train(_environment(whole), replace(settings, ledger_dir=whole, steps=6))
    for steps in (3, 4, 6):
        _train(_environment(parts), replace(settings, ledger_dir=parts, steps=steps))
    assert _losses(parts) == _losses(whole)


def test_training_continues_after_a_failed_background_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(*_: object, **__: object) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        return future

    monkeypatch.setattr(checkpoint, "async_save", full_disk)
    status = _train(_environment(tmp_path), replace(SETTINGS, checkpoint_every=1))
    assert (status.phase, status.step, status.checkpoint_step) == ("succeeded", 4, 4)
    assert "step-00000001: No space left on device" in caplog.text


def test_training_continues_if_a_checkpoint_directory_cannot_be_created(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = _environment(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    checkpoint_path(tmp_path / "checkpoints", 1).write_text("a file in the way")
    status = _train(environment, replace(SETTINGS, checkpoint_every=1))
    assert (status.phase, status.step, status.checkpoint_step) == ("succeeded", 4, 4)
    assert "step-00000001: Not a directory" in caplog.text


def test_frozen_blocks_are_reported_when_they_freeze_and_when_a_checkpoint_has_more(
    tmp_path: Path,
) -> None:
    environment = _environment(tmp_path)
    settings = replace(SETTINGS, freeze=((2, 1),), checkpoint_every=1)
    assert _train(environment, replace(settings, steps=2)).frozen_layers is None
    assert _train(environment, replace(settings, steps=3)).frozen_layers == 1
    assert _train(environment, replace(SETTINGS, steps=5)).frozen_layers == 1
    known = replace(environment, frozen_layers=1)
    assert _train(known, replace(SETTINGS, steps=6)).frozen_layers is None


def test_layers_frozen_by_the_control_plane_override_the_checkpoint(tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    _train(environment, replace(SETTINGS, steps=2))
    _train(replace(environment, frozen_layers=1), replace(SETTINGS, steps=4))
    before, after = (_weights(tmp_path / "checkpoints", step) for step in (2, 4))
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    assert frozen == {name for name in before if name.startswith(("embedding.", "blocks.0."))}
    manifest = find_latest_manifest(tmp_path / "checkpoints")
    assert manifest is not None
    assert manifest.position.frozen == 1


def test_head_trains_when_all_blocks_are_frozen_from_the_start(tmp_path: Path) -> None:
    environment = replace(_environment(tmp_path), frozen_layers=2)
    _train(environment, replace(SETTINGS, checkpoint_every=1))
    before, after = (_weights(tmp_path / "checkpoints", step) for step in (3, 4))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith("head.")
    }


def test_freezing_by_option_equals_freezing_by_the_control_plane(
    tmp_path: Path,
) -> None:
    option, known = tmp_path / "option", tmp_path / "known"
    status = _train(_environment(option), replace(SETTINGS, freeze=((0, 1),), ledger_dir=option))
    _train(replace(_environment(known), frozen_layers=1), replace(SETTINGS, ledger_dir=known))
    assert _losses(option) == _losses(known)
    assert status.frozen_layers == 1


def test_more_frozen_layers_than_blocks_are_rejected(tmp_path: Path) -> None:
    environment = replace(_environment(tmp_path), frozen_layers=3)
    with pytest.raises(ValueError, match=r"`EBBTIDE_FROZEN_LAYERS` freezes 3 blocks.* 2"):
        _train(environment)


def _weights(root: Path, step: int) -> dict[str, torch.Tensor]:
    model = build_gpt(SIZES["nano-gpt"], seed=0, dtype=torch.float32)
    state = {"model": model.state_dict()}
    with Session(RankEnvironment()) as session:
        session.init_process_group()
        load(state, storage_reader=FileSystemReader(checkpoint_path(root, step)))
        session.succeed()
    return state["model"]
