"""A small GPT: token and position embeddings, pre-norm blocks, tied output weights."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.heads, self.dropout = config.n_embd, config.n_head, config.dropout
        self.norm_1 = nn.LayerNorm(width, bias=config.bias)
        self.attention_in = nn.Linear(width, 3 * width, bias=config.bias)
        self.attention_out = nn.Linear(width, width, bias=config.bias)
        self.norm_2 = nn.LayerNorm(width, bias=config.bias)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=config.bias),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=config.bias),
            nn.Dropout(config.dropout),
        )

    def attend(self, x):
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attention_in(x).chunk(3, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = self.attention_out(y.transpose(1, 2).reshape(batch, tokens, width))
        return functional.dropout(y, self.dropout, self.training)

    def forward(self, x):
        x = x + self.attend(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.token_embedding.weight = self.head.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets=None):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        decayed = [p for p in self.parameters() if p.requires_grad and p.dim() >= 2]
        others = [p for p in self.parameters() if p.requires_grad and p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type == "cuda")
