"""A small training with Lightning that prints what happens: `lightning_probe.py OPTIONS`, a JSON object.

`batch_size`, `global_batch`, `manual` and `frequency` of the scheduler are options of the script, the others of the
Trainer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ebbtide.integrations.lightning import ElasticCallback


class Probe(lightning.LightningModule):
    """Prints samples, random numbers, validations and ends of epochs."""

    def __init__(self, *, frequency: int, manual: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.frequency = frequency
        self.automatic_optimization = not manual

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        rate = self.optimizers().param_groups[0]["lr"]
        place = f"{self.trainer.current_epoch} {self.global_step}"
        print(f"> train {place} {batch[0].flatten().int().tolist()} {torch.rand(1).item():.6f} {rate:.9f}", flush=True)
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def validation_step(self, _batch: list[torch.Tensor], number: int) -> None:
        if not self.trainer.sanity_checking:
            print(f"> validation {self.trainer.current_epoch} {self.global_step} {number}", flush=True)

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"> stepped {self.trainer.current_epoch} {self.global_step}", flush=True)

    def on_train_epoch_end(self) -> None:
        print(f"> end {self.trainer.current_epoch} {self.global_step}", flush=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        config = {"scheduler": scheduler, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


def main() -> None:
    options: dict[str, Any] = {"batch_size": 2, "global_batch": 0, "frequency": 1, "manual": False, "max_epochs": 2}
    options |= json.loads(sys.argv[1])
    lightning.seed_everything(3, verbose=False)
    model = Probe(frequency=options.pop("frequency"), manual=options.pop("manual"))
    samples = TensorDataset(torch.arange(1.0, 13.0)[:, None])
    loaders = [DataLoader(samples, options.pop("batch_size"), shuffle=True), DataLoader(samples, 6)]
    elastic = ElasticCallback(global_batch=options.pop("global_batch"))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(callbacks=[elastic], **elastic.ranks, accelerator="cpu", **quiet, **options)
    trainer.fit(model, *loaders, ckpt_path=elastic.checkpoint)


if __name__ == "__main__":
    main()
