"""Trains a small language model with the Trainer of Hugging Face, as run_clm.py does. No data is downloaded.

The lines marked `# Ebbtide` are all that a script needs to take part in resizes.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

from ebbtide.integrations.transformers import ElasticCallback  # Ebbtide


class CountingSentences(torch.utils.data.Dataset):
    """Sentences that count upwards from a random number."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        starts = torch.randint(vocabulary, (count, 1), generator=torch.Generator().manual_seed(1))
        self.tokens = (starts + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes, **rates))
    trainer = Trainer(model=model, args=training_args, train_dataset=CountingSentences(200, 16, 64))
    elastic = ElasticCallback(trainer)  # Ebbtide
    trainer.train(resume_from_checkpoint=elastic.checkpoint)  # Ebbtide
    trainer.save_model()


if __name__ == "__main__":
    main()
