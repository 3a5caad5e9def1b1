"""Kernels and communication of a training program, which change its speed and memory under the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Word = TypeVar("Word", bound=StrEnum)


class AttentionKernel(StrEnum):
    """The kernel of the fused attention core.

    PROFILE is the one that the GPU profile's `attention_efficiency` was measured with. Each generation is faster by a
    published factor, on a GPU for which it exists. FLASH_1 is FlashAttention (arXiv 2205.14135) and the Triton kernels
    of its time, FLASH_2 is FlashAttention-2 (arXiv 2307.08691), and FLASH_3 is FlashAttention-3 (arXiv 2407.08608) or
    cuDNN 9 on Hopper. NEWEST is the newest kernel for the GPU.
    """

    PROFILE = "profile"
    FLASH_1 = "flash-1"
    FLASH_2 = "flash-2"
    FLASH_3 = "flash-3"
    NEWEST = "newest"

    @property
    def generation(self) -> int:
        """Return 0 for PROFILE; NEWEST is a generation that no GPU exceeds."""
        return list(AttentionKernel).index(self)


KERNEL_SPEEDS = (1.0, 1.0, 2.0, 3.0)
"""Speed of the attention kernel of each generation, in multiples of the first.

FlashAttention-2 is about twice as fast as its predecessor (abstract), and FlashAttention-3 1.5 to 2 times as fast as
FlashAttention-2 on H100 (abstract). The profiles of a100-80g and h100-80g, fitted to a kernel of the first generation,
reach 66% and 38% of the peak with FLASH_2, where the papers report 50 to 73% and 35%."""

SOFTMAX_SHARES = (0.0, 0.0, 0.2, 1 / 3)
"""Share of the kernel's time in exponentials at a head width of 128, by generation.

Exponentials per score do not depend on the head width, products do. On H100 exponentials take half the time of the
products (FlashAttention-3, section 3.1: 3.9 against 989 TFLOP/s, 512 times as many products), on A100 a quarter. No
head width was slower with the kernels of the first generation, which left the tensor cores idle for other reasons."""

REFERENCE_HEAD_WIDTH = 128


class LossKernel(StrEnum):
    """How the loss over a vocabulary is computed.

    STORED keeps logits in the training precision and in fp32, with gradients. FUSED overwrites the logits with their
    gradient, in one kernel or in chunks of rows (Liger Kernel, arXiv 2410.10989; FlashAttention's cross-entropy).
    """

    STORED = "stored"
    FUSED = "fused"


class TensorMessages(StrEnum):
    """How the messages of tensor parallelism with a sharded sequence run.

    OVERLAPPED cuts each message and its product into a piece per rank, so that a piece travels while the one before it
    is multiplied (async tensor parallelism of PyTorch, `--tp-comm-overlap` of Megatron-LM). EXPOSED waits for them.
    """

    EXPOSED = "exposed"
    OVERLAPPED = "overlapped"


class MatrixProducts(StrEnum):
    """The number format of the products of a layer's weights, in both passes.

    PLAIN is the training precision. FP8 casts the operands of each product to 8 bits, with scales from their values,
    and keeps weights, activations, head and attention as they are (torchao.float8, and TransformerEngine's recipes).
    """

    PLAIN = "plain"
    FP8 = "fp8"


FP8_OPERAND_TRAFFIC = 1.5
"""Traffic of the operands of a product in fp8 over that in 16 bits. An input of 2 bytes is read, written with 1 and
read again with 1. An output is written with 2, as in 16 bits."""


@dataclass(frozen=True, slots=True)
class TrainingSoftware:
    """The kernels of the training program. The defaults are what plain PyTorch does today."""

    attention: AttentionKernel = AttentionKernel.NEWEST
    loss: LossKernel = LossKernel.STORED
    tensor_messages: TensorMessages = TensorMessages.EXPOSED
    products: MatrixProducts = MatrixProducts.PLAIN


DEFAULT_SOFTWARE = TrainingSoftware()
SOFTWARE_FIELDS = tuple(TrainingSoftware.__dataclass_fields__)


def parse_software(words: Mapping[str, str]) -> TrainingSoftware:
    """Return the software that `words` state by field; absent fields have their defaults.

    Raises:
        ValueError: a word is none of its field's. The message names field and value.
    """
    return TrainingSoftware(
        attention=_parse_word(words, "attention", DEFAULT_SOFTWARE.attention),
        loss=_parse_word(words, "loss", DEFAULT_SOFTWARE.loss),
        tensor_messages=_parse_word(words, "tensor_messages", DEFAULT_SOFTWARE.tensor_messages),
        products=_parse_word(words, "products", DEFAULT_SOFTWARE.products),
    )


def _parse_word(words: Mapping[str, str], field: str, default: Word) -> Word:
    kind, word = type(default), words.get(field, default.value)
    if word not in list(kind):
        raise ValueError(f"{field} is {word!r}; allowed are {', '.join(kind)}")
    return kind(word)
