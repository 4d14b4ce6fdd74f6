"""The states of all random generators that a training run draws from, so that it resumes with the same draws."""

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


def random_state(generators: Iterable[torch.Generator] = ()) -> dict[str, Any]:
    """States of Python's, NumPy's (where it is loaded) and torch's generators, each GPU's, and the given ones'."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "given": [generator.get_state() for generator in generators],
    }
    if numpy := sys.modules.get("numpy"):
        name, words, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(words.astype("int64")), *rest)
    return state


def set_random_state(state: dict[str, Any], generators: Iterable[torch.Generator] = ()) -> None:
    """Go back to what `random_state` gave, with the same number of given generators."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    for generator, saved in zip(generators, state["given"], strict=True):
        generator.set_state(saved)
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        name, words, *rest = state["numpy"]
        numpy.random.set_state((name, words.numpy().astype("uint32"), *rest))
