"""The tokenizer and the texts of torchtitan's debug model, which its wheel does not contain."""

from __future__ import annotations

import json
import random
from pathlib import Path

_BEGIN, _END, _UNKNOWN = "<|begin_of_text|>", "<|end_of_text|>", "[UNK]"
_WORDS = [f"word{number}" for number in range(500)]
_TEXTS = 300


def write_assets(folder: Path) -> None:
    """Write `tests/assets` as torchtitan's debug configuration names it, relative to where it runs."""
    assets = folder / "tests" / "assets"
    _write_tokenizer(assets / "tokenizer")
    texts = assets / "c4_test"
    texts.mkdir(parents=True)
    generator = random.Random(1)
    rows = [{"text": _write_text(generator)} for _ in range(_TEXTS)]
    (texts / "data.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_text(generator: random.Random) -> str:
    """Return a text in which each word follows from the one before, so that a model learns it quickly."""
    start, length = generator.randrange(len(_WORDS)), generator.randrange(100, 400)
    return " ".join(_WORDS[(start + step) % len(_WORDS)] for step in range(length))


def _write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {word: number for number, word in enumerate((_BEGIN, _END, _UNKNOWN, *_WORDS))}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[word], "content": word, **special} for word in (_BEGIN, _END)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _UNKNOWN},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": _BEGIN, "eos_token": _END}))
