"""Functions of the user's own: a dataset and what to do with the loss of an evaluation."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scheduler.trainer.dataset import NumberedSamples, TextDataset, Windows
from scheduler.trainer.model import GptSize

EvaluationHook = Callable[[int, float], object]
"""A function of the step and the mean loss, called on rank 0."""


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Return the function `name`, written as MODULE:FUNCTION.

    Raises:
        ValueError: there is no such function; the message names the option.
    """
    module_name, _, function_name = name.partition(":")
    if (folder := str(Path.cwd())) not in sys.path:
        # Ranks start with `-P`. At the end of the path, no file of the user's replaces a module of the trainer.
        sys.path.append(folder)
    if not module_name or not function_name:
        raise ValueError(f"`{option}` is {name!r}. Write MODULE:FUNCTION, such as my_data:build.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's module imports
        raise ValueError(
            f"`{option}` is {name!r}, but there is no module {error.name!r}. "
            "Install it, or run the trainer in the folder that contains it."
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"`{option}` is {name!r}, but {module_name} has no function {function_name!r}.")
    loaded: Callable[..., Any] = function
    return loaded


def load_samples(option: str, name: str, *, size: GptSize, seed: int) -> NumberedSamples:
    """Return the samples of the dataset that the function `name` builds; of the bundled text if the name is empty.

    The function takes `sequence`, the tokens of a sample. It returns the windows.

    Raises:
        ValueError: there is no such function, or it returns no windows.
    """
    if not name:
        return TextDataset(sequence=size.sequence, seed=seed)
    windows = load_function(option, name)(sequence=size.sequence)
    if not hasattr(windows, "__len__") or not hasattr(windows, "__getitem__") or not len(windows):
        raise ValueError(
            f"`{option}`: {name} returned {type(windows).__name__}. It must return a dataset with `__getitem__` and "
            "a `__len__` above 0."
        )
    return NumberedSamples(_CheckedWindows(windows, option=option, name=name, size=size), seed=seed)


class _CheckedWindows:
    """Windows of the user's, each checked when it is read. A GPU's kernel would not say which token id is wrong."""

    def __init__(self, windows: Windows, *, option: str, name: str, size: GptSize) -> None:
        self._windows = windows
        self._source = f"`{option}`: {name}"
        self._size = size

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        window = torch.as_tensor(self._windows[index])
        expected = (self._size.sequence + 1,)
        if window.shape != expected or window.is_floating_point():
            raise ValueError(
                f"{self._source}: item {index} has the shape {tuple(window.shape)} and the type {window.dtype}. "
                f"It must be {expected[0]} integer token ids."
            )
        lowest, highest = int(window.min()), int(window.max())
        if lowest < 0 or highest >= self._size.vocabulary:
            raise ValueError(
                f"{self._source}: item {index} has token ids from {lowest} to {highest}. "
                f"The model accepts 0 to {self._size.vocabulary - 1}."
            )
        return window
