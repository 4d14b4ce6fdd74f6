"""Measures how sparse the inputs of a graph's layers are, by running the graph once."""

from typing import Any

import torch
from torch import fx

from sparsecomp.passes.canonicalize import op_of
from sparsecomp.passes.rule import site_key

_LAYERS = ("conv2d", "linear")


class DensityRecorder(fx.Interpreter):
    """Runs a graph as it is and keeps the share of non-zero inputs of every layer.

    Attributes:
        densities: share of non-zero inputs by `passes.rule.site_key`, filled by `run`.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.densities: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        op = op_of(n)
        if op is not None and op.name in _LAYERS and isinstance(op.input, fx.Node):
            value = self.env[op.input]
            if isinstance(value, torch.Tensor) and value.numel():
                self.densities[site_key(n)] = torch.count_nonzero(value).item() / value.numel()
        return super().run_node(n)
