"""Job configuration for torchtitan: `torchtitan.train --module elastic_llama --config elastic_llama3_debugmodel`.

The lines marked `# Ebbtide` are all that a configuration needs to take part in resizes.
"""

from __future__ import annotations

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from ebbtide.integrations.torchtitan import make_elastic  # Ebbtide


def elastic_llama3_debugmodel() -> Trainer.Config:
    """Return the debug model of Llama 3 with a global batch of 16 samples on any number of GPUs."""
    config = llama3_debugmodel()
    config.training.steps = 1000
    return make_elastic(config, global_batch=16)  # Ebbtide
