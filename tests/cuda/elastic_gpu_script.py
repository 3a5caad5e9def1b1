"""A loop over `ebbtide.elastic` with what trainings on a GPU use: `elastic_gpu_script.py STEPS [OPTION ...]`.

Options: `ddp`, `compile`, `float16` (with a gradient scaler), `steady` (no dropout), `wide` (a model of
0.5 GB).

It prints the loss of each step, random numbers of the GPU at the end, and figures of the restored state.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ebbtide

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_loader() -> DataLoader[Any]:
    samples = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(samples, samples.sum(dim=1, keepdim=True))
    on_gpu = DEVICE == "cuda"
    return DataLoader(dataset, batch_size=8, shuffle=True, num_workers=1, pin_memory=on_gpu, persistent_workers=True)


def make_model(*, is_wide: bool, dropout: float) -> nn.Module:
    width = 8192 if is_wide else 64
    inner = (nn.Linear(width, width), nn.Linear(width, width))
    layers = (nn.Linear(32, width), nn.ReLU(), nn.Dropout(dropout), *inner, nn.Linear(width, 1))
    return nn.Sequential(*layers).to(DEVICE)


def describe(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, *, step: int) -> str:
    """Return what a test asserts of the state at the start of a generation."""
    figures: dict[str, Any] = {"resumed": step, "scale": scaler.get_scale()}
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    figures["devices"] = sorted({tensor.device.type for tensor in (*model.parameters(), *tensors)})
    figures["parameter_bytes"] = sum(each.nbytes for each in model.parameters())
    if DEVICE == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
        figures["bytes"] = torch.cuda.memory_allocated()
    return json.dumps(figures)


def main(steps: int, options: frozenset[str]) -> None:
    if "ddp" in options:
        init_process_group("nccl" if DEVICE == "cuda" else "gloo")
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = make_model(is_wide="wide" in options, dropout=0.0 if "steady" in options else 0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    if "compile" in options:
        model = torch.compile(model)  # type: ignore[assignment]
    if "ddp" in options:
        model = DistributedDataParallel(model, device_ids=[0] if DEVICE == "cuda" else None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))
    # The scale doubles every third step, so that a restored one differs from a new one.
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=3, enabled="float16" in options)
    loader = make_loader()
    with ebbtide.elastic(model, optimizer, scheduler, loader, scaler=scaler, epochs=steps // len(loader)) as run:
        print(f"state {describe(model, optimizer, scaler, step=run.step)}", flush=True)
        for samples, targets in run:
            samples, targets = samples.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True)
            with torch.autocast(DEVICE, dtype=torch.float16, enabled="float16" in options):
                loss = nn.functional.mse_loss(model(samples), targets)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            run.report(loss=loss)
            print(f"step {run.step + 1} loss {loss.item():.9f}", flush=True)
    print(f"random {torch.rand(4, device=DEVICE).tolist()}", flush=True)
    if "ddp" in options:
        destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), frozenset(sys.argv[2:]))
