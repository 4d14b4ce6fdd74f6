"""Every operation by name, found in the rooms, for tuning ahead of any call."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from sparsecomp.lowering.tuning.template import Operation

_ROOMS = ("spiking", "sparse", "masked", "local")


@cache
def operations() -> Mapping[str, Operation[Any]]:
    """Operation by name."""
    rooms = [importlib.import_module(f"sparsecomp.lowering.{room}") for room in _ROOMS]
    names = [f"{room.__name__}.{one.name}" for room in rooms for one in pkgutil.iter_modules(room.__path__)]
    every = (value for name in names for value in vars(importlib.import_module(name)).values())
    return {value.name: value for value in every if isinstance(value, Operation)}
