"""Small multi-step networks of spikingjelly's layers and neurons, and how their rewritten graphs run on kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rewriting import dyadic
from torch import Tensor, fx, nn

from sparsecomp.compiler.capture import Graph
from sparsecomp.options import Options
from sparsecomp.report import Report, merge

neuron, functional, layer = (
    pytest.importorskip(f"spikingjelly.activation_based.{name}") for name in ("neuron", "functional", "layer")
)
pytest.importorskip("spikingjelly._ops.lif")


def block(inputs: int, outputs: int, make: Callable[[], nn.Module], **how: Any) -> list[nn.Module]:
    """A multi-step convolution of three by three, batch-norm and neurons."""
    conv = layer.Conv2d(inputs, outputs, 3, padding=1, bias=False, step_mode="m", **how)
    norm = layer.BatchNorm2d(outputs, step_mode="m")
    return [conv, norm, make()]


def lively(model: nn.Module, x: Tensor, seed: int = 0) -> nn.Module:
    """The model with weights that are exact in any order, and statistics of batch-norm by which its layers fire."""
    dyadic(model, seed).eval()
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train().momentum = None
        nn.init.constant_(norm.weight, 2.0)
        nn.init.constant_(norm.bias, 0.5)
    with torch.no_grad():
        model(x)
    functional.reset_net(model)
    return model.eval()


def lif() -> nn.Module:
    return neuron.LIFNode(step_mode="m")


def images(steps: int = 4, channels: int = 3) -> Tensor:
    x = torch.rand(steps, 2, channels, 6, 6, generator=torch.Generator().manual_seed(0))
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (steps, 2))


class ByKernels(fx.Interpreter):
    """Runs a graph with our layers and neurons on Triton's kernels, in its interpreter."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from sparsecomp.lowering.spiking import conv_lif, conv_neuron, lif, spike_conv
        from sparsecomp.lowering.spiking import neuron as described

        kernels = {
            torch.ops.sparsecomp.conv_neuron.default: conv_neuron.launch_conv_neuron,
            torch.ops.sparsecomp.neuron.default: described.launch_neuron,
            torch.ops.sparsecomp.conv_lif.default: conv_lif.launch_conv_lif,
            torch.ops.sparsecomp.lif.default: lif.launch_lif,
            torch.ops.sparsecomp.spike_conv.default: lambda *args: spike_conv.launch_conv(*args[:-1]),
            torch.ops.sparsecomp.spike_linear.default: lambda *args: spike_conv.launch_linear(*args[:-1]),
        }
        return super().call_function(kernels.get(target, target), args, kwargs)


def by_kernels(model: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, Report]:
    """As `rewritten`, on the kernels."""
    parsed, reports = Options.parse(None, {"implementation": "binary", "neurons": "fuse", **options}), []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reports.append(Graph.of_dynamo(gm, example_inputs, {}, parsed).rewrite(parsed))
        return ByKernels(gm).run

    torch._dynamo.reset()
    result = torch.compile(model, backend=backend)(*inputs)
    return result, merge(reports, "test")
