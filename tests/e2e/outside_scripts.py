"""Training scripts as outside projects write them. They know torch and its environment, and nothing of Ebbtide.

`outside_scripts.py STYLE`: `ddp` uses DistributedDataParallel as nanoGPT and minGPT-ddp do; `hf` is a script for the
Trainer of Hugging Face, `lightning` one for Lightning. Rank 0 prints `finished STEPS of WORLD_SIZE`.
"""

from __future__ import annotations

import os
import sys

import torch

STEPS = 4


def train_with_ddp() -> None:
    torch.distributed.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.distributed.all_reduce(loss.detach())
    if rank == 0:
        print(f"finished {STEPS} of {world_size}")
    torch.distributed.destroy_process_group()


def train_with_hf() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    tokens = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 100, (64, 16))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        output_dir="out", max_steps=STEPS, use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no"
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=tokens)
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"finished {trainer.state.global_step} of {arguments.world_size}")


def train_with_lightning() -> None:
    import lightning

    class Model(lightning.LightningModule):  # type: ignore[misc]  # it may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    samples = torch.utils.data.TensorDataset(torch.randn(64, 8))
    trainer.fit(Model(), torch.utils.data.DataLoader(samples, batch_size=2))
    if trainer.is_global_zero:
        print(f"finished {trainer.global_step} of {trainer.world_size}")


STYLES = {"ddp": train_with_ddp, "hf": train_with_hf, "lightning": train_with_lightning}
STYLES[sys.argv[1]]()
