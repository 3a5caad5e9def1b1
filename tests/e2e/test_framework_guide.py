"""The Python blocks of the guide to frameworks train, each between what a script has before and after them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.docs.python_blocks import read_python_blocks
from tests.e2e.framework_probes import LONG_WITH_FRAMEWORKS
from tests.e2e.framework_trainings import PYTHON

_SAMPLES = """
import torch
samples = torch.utils.data.TensorDataset(torch.arange(12.0)[:, None])
loader = torch.utils.data.DataLoader(samples, batch_size=2)
"""
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 4, "vocab_size": 8}
model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
tokens = torch.arange(8).view(2, 4)
dataset = [{"input_ids": row, "labels": row} for row in tokens]
training_args = TrainingArguments("out", per_device_train_batch_size=1, report_to="none", use_cpu=True)
"""
ACCELERATE = f"""
from accelerate import Accelerator
{_SAMPLES}
accelerator, epochs, model = Accelerator(cpu=True), 2, torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
"""
ACCELERATE_BODY = """accelerator.backward(model(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()"""
LIGHTNING = f"""
import lightning
{_SAMPLES}
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, number):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)
model = Model()
"""

pytestmark = LONG_WITH_FRAMEWORKS


def _run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [str(PYTHON), "-c", script],
        cwd=folder,
        env={**os.environ, "EBBTIDE_CHECKPOINT_DIR": str(folder), "EBBTIDE_RUN_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_block_of_the_trainer_saves_checkpoints_of_the_job(tmp_path: Path) -> None:
    block = read_python_blocks("use-your-framework")[0]
    printed = _run(f"{TRAINER}\n{block}\nprint('steps', trainer.state.global_step)", tmp_path)
    assert printed.splitlines()[-1] == "steps 6"
    assert (tmp_path / "out" / "checkpoint-6" / "ebbtide.json").exists()


def test_the_block_of_accelerate_trains_all_epochs(tmp_path: Path) -> None:
    block = read_python_blocks("use-your-framework")[1].replace("...", ACCELERATE_BODY)
    assert _run(f"{ACCELERATE}\n{block}\nprint('steps', loader.step)", tmp_path).splitlines()[-1] == "steps 12"


def test_the_block_of_lightning_trains_with_the_callback(tmp_path: Path) -> None:
    block = read_python_blocks("use-your-framework")[2].replace("lightning.Trainer(", "lightning.Trainer(max_epochs=2,")
    printed = _run(f"{LIGHTNING}\n{block}\nprint('steps', trainer.global_step)", tmp_path)
    assert printed.splitlines()[-1] == "steps 12"


def test_the_block_of_torchtitan_makes_a_configuration(tmp_path: Path) -> None:
    block = read_python_blocks("use-your-framework")[3]
    printed = _run(f"{block}\nprint('batch', elastic_llama3_debugmodel().training.global_batch_size)", tmp_path)
    assert printed.splitlines()[-1] == "batch 16"
