"""Write `train.bin` and `val.bin` with the bytes of a text: `python prepare.py FOLDER [TEXT]`.

Without a text, sentences of a tiny grammar are written.
"""

import random
import sys
from pathlib import Path

import numpy as np

WORDS = (
    ("the", "a"),
    ("tide", "moon", "crab", "boat"),
    ("lifts", "sees", "follows"),
    ("every", "one"),
    ("shore", "net"),
)


def write_sentences(count):
    generator = random.Random(1337)
    return "\n".join(" ".join(generator.choice(words) for words in WORDS) + "." for _ in range(count))


def main(folder, text):
    tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
    split = int(0.9 * len(tokens))
    folder.mkdir(parents=True, exist_ok=True)
    tokens[:split].tofile(folder / "train.bin")
    tokens[split:].tofile(folder / "val.bin")


main(Path(sys.argv[1]), Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else write_sentences(2000))
