"""A small training with the Trainer of Hugging Face that prints what happens: `transformers_probe.py OPTIONS`.

OPTIONS is a JSON object. `stream` trains from an IterableDataset, and `nan_from` is the first step whose loss is not
finite. The others are options of the Trainer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from ebbtide.integrations.transformers import ElasticCallback

COUNT = 12


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor([float(index)])}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        numbers = Numbers()
        yield from (numbers[index] for index in range(COUNT))


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.layer(number).square().mean()
        return {"loss": loss, "logits": number}


class Printer(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"> step {state.global_step}", flush=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"> evaluation {state.global_step}", flush=True)


class Probe(Trainer):
    nan_from: int

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] * (
            float("nan") if model.training and self.state.global_step + 1 >= self.nan_from else 1.0
        )
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    options = {"stream": False, "nan_from": 10**9, "num_train_epochs": 2, **json.loads(sys.argv[1])}
    set_seed(3)
    data = Stream() if options.pop("stream") else Numbers()
    nan_from = options.pop("nan_from")
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    arguments = TrainingArguments("out", per_device_train_batch_size=2, **{**quiet, **options})
    trainer = Probe(Squares(), arguments, train_dataset=data, eval_dataset=Numbers(), callbacks=[Printer()])
    trainer.nan_from = nan_from
    elastic = ElasticCallback(trainer)
    trainer.train(resume_from_checkpoint=elastic.checkpoint)


if __name__ == "__main__":
    main()
