"""Train a GPT in the manner of minGPT-ddp: a Trainer class, a DataLoader with a DistributedSampler, snapshots by epoch.

    torchrun --nproc-per-node 2 train.py --epochs 3

The lines that end in `# Ebbtide` are the only ones that a script of this kind needs to be resized.
"""

import argparse
import os
from dataclasses import dataclass

import ebbtide  # Ebbtide
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class CharDataset(Dataset):
    """Blocks of characters of a text, each with the block that is one character later."""

    def __init__(self, text, block_size):
        self.data = torch.tensor(list(text.encode()), dtype=torch.long)
        self.block_size = block_size

    def __len__(self):
        return (len(self.data) - 1) // self.block_size

    def __getitem__(self, index):
        start = index * self.block_size
        block = self.data[start : start + self.block_size + 1]
        return block[:-1], block[1:]


class TinyGPT(nn.Module):
    def __init__(self, block_size, width=32, heads=2, layers=2, vocabulary=256):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(block_size, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source, targets):
        length = source.shape[1]
        mask = torch.full((length, length), float("-inf"), device=source.device).triu(1)
        logits = self.head(self.blocks(self.tokens(source) + self.positions[:length], mask=mask))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class TrainerConfig:
    max_epochs: int
    batch_size: int
    data_loader_workers: int = 0
    grad_norm_clip: float = 1.0
    use_amp: bool = False
    log_every: int = 1


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(self.device_type, self.local_rank if self.device_type == "cuda" else None)
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=config.use_amp)
        device_ids = [self.local_rank] if self.device_type == "cuda" else None
        self.model = DistributedDataParallel(model.to(self.device), device_ids=device_ids)

    def _prepare_dataloader(self, dataset):
        return DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            pin_memory=self.device_type == "cuda",
            shuffle=False,
            num_workers=self.config.data_loader_workers,
            sampler=DistributedSampler(dataset),
        )

    def _run_batch(self, source, targets):
        with torch.amp.autocast(self.device_type, dtype=torch.float16, enabled=self.config.use_amp):
            _, loss = self.model(source, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def _run_epoch(self, epoch, dataloader):
        dataloader.sampler.set_epoch(epoch)
        for number, (source, targets) in enumerate(dataloader):
            loss = self._run_batch(source.to(self.device), targets.to(self.device))
            if number % self.config.log_every == 0:
                print(f"[RANK{self.global_rank}] epoch {epoch} | batch {number} | loss {loss:.6f}", flush=True)

    def train(self):
        with ebbtide.elastic(self.model, self.optimizer, None, self.train_loader, scaler=self.scaler) as run:  # Ebbtide
            for epoch in run.epochs(self.config.max_epochs):  # Ebbtide
                self._run_epoch(epoch, run)  # Ebbtide


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default="input.txt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per process at the first start")
    parser.add_argument("--block-size", type=int, default=32)
    arguments = parser.parse_args()
    init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    with open(arguments.text) as file:
        dataset = CharDataset(file.read(), arguments.block_size)
    model = TinyGPT(arguments.block_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = TrainerConfig(arguments.epochs, arguments.batch_size)
    Trainer(config, model, optimizer, dataset).train()
    destroy_process_group()


if __name__ == "__main__":
    main()
