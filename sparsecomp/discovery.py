"""What the modules of a package define, found there: a new file is all that a new thing needs."""

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def modules_within(package: str) -> list[str]:
    """Full names of the modules in a package and in the packages within it, which are imported."""
    path = importlib.import_module(package).__path__
    return [one.name for one in pkgutil.walk_packages(path, f"{package}.")]


def instances(kind: type[T], modules: Iterable[str]) -> tuple[T, ...]:
    """The objects of a class at the top of these modules, which are imported."""
    values = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    return tuple(value for value in values if isinstance(value, kind))
