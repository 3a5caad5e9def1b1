"""Imports of all modules that a rank of the reference trainer needs.

The node agent imports this module before it forks ranks. Besides the trainer it imports modules that torch would load
lazily on first use.
"""

from __future__ import annotations

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.serialization  # noqa: F401  # imported for the forked ranks

import scheduler.trainer.trainer  # noqa: F401  # imported for the forked ranks
