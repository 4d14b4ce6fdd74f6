"""Every operation by name, found in the rooms, for tuning ahead of any call."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from sparsecomp.discovery import instances, modules_within
from sparsecomp.lowering.tuning.template import Operation


@cache
def all_operations() -> Mapping[str, Operation[Any]]:
    """Operation by name. A room is a package that has kernels."""
    names = modules_within("sparsecomp.lowering")
    rooms = {name.removesuffix(".kernels") for name in names if name.endswith(".kernels")}
    launchers = (name for name in names if name.rpartition(".")[0] in rooms)
    return {one.name: one for one in instances(Operation, launchers)}
