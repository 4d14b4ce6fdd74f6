"""Whole spiking networks: sparsecomp beside eager and stock ``torch.compile``, every layer firing at a real rate."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench import networks
from bench.timing import eager_ms

PRECISIONS = ("fp32", "tf32", "fp16")


def run(name: str, time_steps: int = 4, batch: int = 32, precisions: tuple[str, ...] = PRECISIONS) -> dict:
    """Time one network in each precision.

    Returns:
        ``{"rates": {layer: rate}, "ms": {"tf32/stock compile channels_last": …}, "sites": {…}, "error": {…}}``.
    """
    net = getattr(networks, name)().cuda()
    x = torch.rand(time_steps, batch, 3, 224, 224, device="cuda")
    rates = networks.make_fire(net, x)
    result: dict[str, Any] = {"network": name, "shape": list(x.shape), "rates": rates}
    result |= {"ms": {}, "sites": {}, "error": {}}
    reference = _output(net, x.float())
    for precision in precisions:
        for label, backend, channels_last in _variants(precision):
            ms, out, sites = _measure(net, x, precision, backend, channels_last)
            key = f"{precision}/{label}"
            result["ms"][key] = ms
            result["error"][key] = ((out - reference).norm() / reference.norm()).item()
            if sites is not None:
                result["sites"][key] = sites
            print(f"{name} {key}: {ms:.3f} ms, differs from eager fp32 by {result['error'][key]:.2e}", flush=True)
    return result


def _variants(precision: str) -> list[tuple[str, str | None, bool]]:
    variants: list[tuple[str, str | None, bool]] = [("stock compile channels_last", "inductor", True)]
    if precision != "fp16":
        variants = [("eager", None, False), ("stock compile", "inductor", False), *variants]
        variants.append(("sparsecomp", "sparsecomp", False))
    return [*variants, ("sparsecomp channels_last", "sparsecomp", True)]


def _measure(net: nn.Module, x: torch.Tensor, precision: str, backend: str | None, channels_last: bool):
    import copy

    import sparsecomp

    model = copy.deepcopy(net)
    if precision == "fp16":
        model, x = model.half(), x.half()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    torch._dynamo.reset()
    options = {"precision": "tf32"} if precision == "tf32" and backend == "sparsecomp" else None
    call = model if backend is None else torch.compile(model, backend=backend, options=options)
    step = _step(model, call, x)
    with torch.no_grad():
        out = step().float()
        ms = eager_ms(step)
    report = sparsecomp.last_report() if backend == "sparsecomp" else None
    sites = None if report is None else {"rewritten": len(report.rewritten), "all": len(report.sites)}
    return ms, out, sites


def _step(model: nn.Module, call: Any, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    from spikingjelly.activation_based import functional

    def step() -> torch.Tensor:
        functional.reset_net(model)
        return call(x)

    return step


def _output(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        return _step(net, net, x)().float()
