"""A small training with Accelerate: `accelerate_probe.py NAN_FROM [BREAK_AFTER]`.

The arguments are the first step whose loss is not finite, and the step after which the loop breaks.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from ebbtide.integrations.accelerate import ElasticLoader


def main() -> None:
    nan_from, break_after = (int(word) for word in [*sys.argv[1:], "1000"][:2])
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.arange(1.0, 13.0)[:, None]), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    elastic = ElasticLoader(accelerator, loader)
    for _ in range(2):
        for (numbers,) in elastic:
            with accelerator.accumulate(model):
                loss = model(numbers).square().mean() * (float("nan") if elastic.step + 1 >= nan_from else 1.0)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            print(f"> step {elastic.step + 1} {numbers.flatten().int().tolist()}", flush=True)
            if elastic.step + 1 == break_after:
                break
        if elastic.step == break_after:
            break


if __name__ == "__main__":
    main()
