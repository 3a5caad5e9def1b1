"""Trains a small classifier with Accelerate. No data is downloaded.

The lines marked `# Ebbtide` are all that a script needs to take part in resizes.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ebbtide.integrations.accelerate import ElasticLoader  # Ebbtide


def make_samples(count: int) -> TensorDataset:
    """Return points around ten centres, with the number of the centre."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (count,), generator=generator)
    centres = torch.randn(10, 32, generator=generator)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(count, 32, generator=generator), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    options = parser.parse_args()
    set_seed(3)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=options.accumulate)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_samples(200), batch_size=options.batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 / (1.0 + 0.01 * step / accelerator.num_processes)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loader = ElasticLoader(accelerator, loader)  # Ebbtide
    for _ in range(options.epochs):
        for points, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            print(f"step {loader.step + 1} loss {loss.item():.6f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
