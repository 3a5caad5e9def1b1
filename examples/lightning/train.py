"""Trains a classifier of small images with Lightning, as scripts for MNIST do. No data is downloaded.

The lines marked `# Ebbtide` are all that a script needs to take part in resizes.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ebbtide.integrations.lightning import ElasticCallback  # Ebbtide


def make_digits(count: int) -> TensorDataset:
    """Return noisy 8x8 images of ten shapes, with the number of the shape."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (count,), generator=generator)
    shapes = torch.rand(10, 1, 8, 8, generator=generator)
    return TensorDataset(shapes[labels] + 0.2 * torch.randn(count, 1, 8, 8, generator=generator), labels)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        print(f"step {self.global_step + 1} loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    options = parser.parse_args()
    lightning.seed_everything(3, verbose=False)
    elastic = ElasticCallback()  # Ebbtide
    trainer = lightning.Trainer(
        callbacks=[elastic],  # Ebbtide
        **elastic.ranks,  # Ebbtide
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(make_digits(200), batch_size=options.batch_size, shuffle=True)
    trainer.fit(Classifier(), loader, ckpt_path=elastic.checkpoint)  # Ebbtide


if __name__ == "__main__":
    main()
