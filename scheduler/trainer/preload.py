"""What a training process loads, as one import: an agent makes it before it forks ranks.

Beside the trainer's own imports these are modules that torch loads at the first use of what the trainer uses.
"""

from __future__ import annotations

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.serialization  # noqa: F401  # all of them are loaded for the ranks, not for this module

import scheduler.trainer.trainer
import scheduler.worker.rendezvous  # noqa: F401  # likewise
