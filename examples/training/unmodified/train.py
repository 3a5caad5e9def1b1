"""Train with DistributedDataParallel, save on SIGTERM, and resume from the saved file. Nothing here knows Ebbtide.

torchrun --nproc-per-node 2 train.py --out out --steps 100
"""

import argparse
import os
import signal
import sys

import torch
from torch import nn
from torch.distributed import ReduceOp, all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

stop = torch.zeros(1)


def request_stop(_number, _frame):
    stop.fill_(1.0)


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def save(path, model, optimizer, step):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{path}.part")
    os.replace(f"{path}.part", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--global-batch", type=int, default=32)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, request_stop)
    init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    stop.data = stop.to(device)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    os.makedirs(arguments.out, exist_ok=True)
    path = os.path.join(arguments.out, "ckpt.pt")
    first = load(path, network, optimizer)
    model = DistributedDataParallel(network)

    for step in range(first, arguments.steps):
        samples = torch.randn(arguments.global_batch, 16, generator=torch.Generator().manual_seed(step))
        samples = samples[rank::world_size].to(device)
        loss = (model(samples) - samples.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.6f}", flush=True)
        all_reduce(stop, op=ReduceOp.MAX)
        if stop.item():
            if rank == 0:
                save(path, network, optimizer, step + 1)
            destroy_process_group()
            sys.exit(0)
    if rank == 0:
        save(path, network, optimizer, arguments.steps)
    destroy_process_group()


if __name__ == "__main__":
    main()
