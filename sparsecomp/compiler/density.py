"""Measures how sparse the inputs of a graph's layers are, by running the graph once."""

from typing import Any

import torch
from torch import fx

from sparsecomp.passes.engine.rule import Density, site_key
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.spiking.operand import TAKEN


class DensityRecorder(fx.Interpreter):
    """Runs a graph as it is and keeps how sparse the input of every layer is.

    Attributes:
        densities: by `passes.rule.site_key`, filled by `run`.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.densities: dict[str, Density] = {}

    def run_node(self, n: fx.Node) -> Any:
        op = op_of(n)
        if op is not None and op.name in TAKEN and isinstance(op.input, fx.Node):
            value = self.env[op.input]
            if isinstance(value, torch.Tensor) and value.numel():
                share = torch.count_nonzero(value).item() / value.numel()
                self.densities[site_key(n)] = Density(share, active_outputs(op, value))
        return super().run_node(n)


def active_outputs(op: CanonicalOp, x: torch.Tensor) -> float | None:
    """Share of a convolution's output pixels whose window holds a non-zero element of `x`; None for other layers."""
    weight, padding = op.get("weight"), op.get("padding", 0)
    kernel = getattr(weight, "shape", None) or getattr(example_of(weight), "shape", None)
    if op.name != "conv2d" or x.dim() < 4 or kernel is None or isinstance(padding, str):
        return None
    active = (x != 0).any(-3).flatten(0, -3).unsqueeze(1).float()
    # a window of ones counts what it covers, whatever the stride, padding and dilation
    window = torch.ones(1, 1, *kernel[2:], device=x.device)
    covered = torch.nn.functional.conv2d(active, window, None, op.get("stride", 1), padding, op.get("dilation", 1))
    return (covered > 0).float().mean().item() if covered.numel() else None
