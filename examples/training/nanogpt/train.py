"""Train a GPT in the manner of nanoGPT: one flat script, settings as globals, random blocks of a binary file.

    python train.py --max_iters=100                              one process
    torchrun --nproc-per-node 4 train.py --max_iters=100         several processes, with DistributedDataParallel

The lines that end in `# Ebbtide` are the only ones that a script of this kind needs to be resized.
"""

import math
import os
import sys
import time
from contextlib import nullcontext

import ebbtide  # Ebbtide
import numpy as np
import torch
from model import GPT, GPTConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

# ---- settings, each of which `--name=value` overrides
out_dir = "out"
data_dir = "data"
eval_interval = 200
eval_iters = 20
log_interval = 10
gradient_accumulation_steps = 40  # micro-batches of a step on all processes together
batch_size = 12
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.0
bias = False
vocab_size = 256
learning_rate = 6e-4
max_iters = 600
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
decay_lr = True
warmup_iters = 20
lr_decay_iters = 600
min_lr = 6e-5
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "bfloat16" if device == "cuda" else "float32"
compile = False
for argument in sys.argv[1:]:
    key, _, value = argument.removeprefix("--").partition("=")
    if key not in globals():
        raise SystemExit(f"There is no setting {key!r}.")
    kind = type(globals()[key])
    globals()[key] = value == "True" if kind is bool else kind(value)

# ---- processes
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl" if device == "cuda" else "gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)


def get_batch(split):
    data = np.memmap(os.path.join(data_dir, "train.bin" if split == "train" else "val.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x.to(device), y.to(device)


# ---- model and optimizer
config = GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias)
model = GPT(config).to(device)
scaler = torch.amp.GradScaler(device_type, enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)
if compile:
    model = torch.compile(model)
if ddp:
    model = DistributedDataParallel(model, device_ids=[torch.device(device).index] if device_type == "cuda" else None)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


# ---- training loop
raw_model = model.module if ddp else model
best_val_loss = 1e9
best_path = os.path.join(out_dir, "ckpt.pt")
if os.path.exists(best_path):  # of an earlier generation
    best_val_loss = torch.load(best_path, map_location="cpu")["best_val_loss"]
run = ebbtide.elastic(model, optimizer, scaler=scaler)  # Ebbtide
get_batch = run.reproducible(get_batch)  # Ebbtide
X, Y = get_batch("train")  # the first batch
t0 = time.time()
for iter_num in run.steps(max_iters):  # Ebbtide
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}", flush=True)
        if losses["val"] < best_val_loss and iter_num > 0:
            best_val_loss = losses["val"].item()
            checkpoint = {
                "model": raw_model.state_dict(),
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
                "config": vars(config),
            }
            torch.save(checkpoint, best_path)

    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")  # the next batch, while the model computes
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms", flush=True)
        run.report(loss=lossf)  # Ebbtide

if ddp:
    destroy_process_group()
