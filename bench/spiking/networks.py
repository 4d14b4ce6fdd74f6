"""Spiking networks that fire as trained ones do.

With random weights and evaluation-mode batch-norm a deep spiking network is silent, and a silent network flatters every
sparse kernel. Here each neuron's threshold is set, in order of execution, so that its layer fires at a wanted rate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PRECISIONS = ("fp32", "tf32", "fp16")

RATES = (0.08, 0.20)
"""Firing rates of trained networks (Prosperity, 2025: VGG-16 9.0 %, ResNet-18 9.1 %, Spikformer 14.9 %)."""


class DeadNetworkError(RuntimeError):
    """A layer of the benchmark's network does not fire at a real rate, so its timing would mean nothing."""


def sew_resnet34() -> nn.Module:
    """SEW-ResNet-34 (Fang et al., 2021), multi-step, random weights, in evaluation mode."""
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import sew_resnet

    torch.manual_seed(0)
    net = sew_resnet.sew_resnet34(pretrained=False, cnf="ADD", spiking_neuron=neuron.LIFNode)
    functional.set_step_mode(net, "m")
    return net.eval()


def spiking_resnet34() -> nn.Module:
    """Spiking ResNet-34 (spikingjelly), multi-step, random weights, in evaluation mode."""
    from spikingjelly.activation_based import functional, neuron
    from spikingjelly.activation_based.model import spiking_resnet

    torch.manual_seed(0)
    net = spiking_resnet.spiking_resnet34(pretrained=False, spiking_neuron=neuron.LIFNode)
    functional.set_step_mode(net, "m")
    return net.eval()


def small() -> nn.Module:
    """Three spiking convolutions, multi-step, random weights, in evaluation mode."""
    from spikingjelly.activation_based import functional, layer, neuron

    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 64), (64, 128)):
        blocks += [layer.Conv2d(inputs, outputs, 3, padding=1), layer.BatchNorm2d(outputs), neuron.LIFNode()]
    net = nn.Sequential(*blocks)
    functional.set_step_mode(net, "m")
    return net.eval()


def make_fire(net: nn.Module, x: Tensor, rate: float = 0.12) -> dict[str, float]:
    """Set batch-norm statistics from `x` and every neuron's threshold so that its layer fires at `rate`.

    Args:
        net: a multi-step spikingjelly network.
        x: (T, N, C, H, W) input.

    Returns:
        The firing rate of each neuron layer afterwards.

    Raises:
        DeadNetworkError: a layer still fires outside `RATES`.
    """
    from spikingjelly.activation_based import functional, neuron

    neurons = {name: m for name, m in net.named_modules() if isinstance(m, neuron.LIFNode)}
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.train()
            norm.momentum = None
        functional.reset_net(net)
        net(x)
        for norm in norms:
            norm.eval()
        handles = [m.register_forward_pre_hook(_threshold_setter(rate)) for m in neurons.values()]
        functional.reset_net(net)
        net(x)
        for handle in handles:
            handle.remove()
        rates = firing_rates(net, neurons, x)
    dead = {name: r for name, r in rates.items() if not RATES[0] <= r <= RATES[1]}
    if dead:
        raise DeadNetworkError(f"layers fire outside {RATES}: {dead}; check thresholds and batch-norm statistics")
    return rates


def firing_rates(net: nn.Module, neurons: dict[str, Any], x: Tensor) -> dict[str, float]:
    """Share of ones in the output of each neuron layer."""
    from spikingjelly.activation_based import functional

    rates: dict[str, float] = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            rates[name] = output.float().mean().item()

        return record

    handles = [m.register_forward_hook(recorder(name)) for name, m in neurons.items()]
    functional.reset_net(net)
    net(x)
    functional.reset_net(net)
    for handle in handles:
        handle.remove()
    return rates


def _threshold_setter(rate: float) -> Callable[..., None]:
    def set_threshold(module: Any, inputs: tuple[Tensor]) -> None:
        low, high = 0.0, 8.0
        for _ in range(16):
            module.v_threshold = (low + high) / 2
            if _rate(module, inputs[0]) > rate:
                low = module.v_threshold
            else:
                high = module.v_threshold
        # a threshold is a constant of the compiled graph: rounded, every process compiles the same one
        module.v_threshold = round((low + high) / 2, 2)

    return set_threshold


def _rate(module: Any, x: Tensor) -> float:
    """Firing rate of spikingjelly's LIF (hard reset to 0, decaying input) on `x` (T, …) at its present threshold."""
    v, fired = torch.zeros_like(x[0]), 0.0
    for step in x:
        v = v + (step - v) / module.tau
        spike = v >= module.v_threshold
        v = v.masked_fill(spike, 0.0)
        fired += spike.float().mean().item()
    return fired / len(x)
