"""Whole spiking networks: sparsecomp beside eager and stock `torch.compile`, every layer firing at a real rate."""

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import sparsecomp
from bench.spiking import networks
from bench.spiking.networks import PRECISIONS
from bench.timing import eager_ms


def run(
    name: str, time_steps: int = 4, batch: int = 32, precisions: tuple[str, ...] = PRECISIONS,
    labels: tuple[str, ...] = (),
) -> Iterator[dict]:  # fmt: skip
    """Time one network in each precision.

    Args:
        labels: of the variants that are timed; of none, all.

    Yields:
        The figures so far, after each variant: firing `rates` by layer, and by `precision/variant` the `ms` of a
        call, `compile_s` of the first one, rewritten `sites`, and relative `error` against eager float32.
    """
    net = getattr(networks, name)().cuda()
    x = torch.rand(time_steps, batch, 3, 224, 224, device="cuda")
    rates = networks.make_fire(net, x)
    print({layer: round(rate, 3) for layer, rate in rates.items()}, flush=True)
    result: dict[str, Any] = {"network": name, "shape": list(x.shape), "rates": rates}
    result |= {"ms": {}, "compile_s": {}, "sites": {}, "error": {}}
    reference = _output(net, x)
    for precision in precisions:
        for variant in variants(precision):
            if labels and variant.label not in labels:
                continue
            key = f"{precision}/{variant.label}"
            measured = measure(net, x, precision, variant)
            result["ms"][key], result["compile_s"][key] = measured["ms"], measured["compile_s"]
            error = ((measured.pop("out") - reference).norm() / reference.norm()).item()
            result["error"][key] = error
            if "sites" in measured:
                result["sites"][key] = measured["sites"]
            print(f"{name} {key}: {measured}, differs from eager fp32 by {error:.2e}", flush=True)
            yield result


class Variant(NamedTuple):
    """One way to run a network."""

    label: str
    backend: str | None
    channels_last: bool = True
    mode: str | None = None
    disable: tuple[str, ...] = ()
    neurons: str = "auto"


def variants(precision: str) -> list[Variant]:
    """What is timed in one precision; the peers first."""
    stock, ours = Variant("stock compile", "inductor"), Variant("sparsecomp", "sparsecomp")
    stock_graph = Variant("stock compile, reduce-overhead", "inductor", mode="reduce-overhead")
    ours_graph = Variant("sparsecomp, reduce-overhead", "sparsecomp", mode="reduce-overhead")
    apart = ours_graph._replace(label="sparsecomp, neurons apart, reduce-overhead", disable=("fuse_conv_neuron",))
    sums = ours_graph._replace(label="sparsecomp, residuals apart, reduce-overhead", disable=("fuse_residual",))
    if precision == "fp32":
        return [Variant("eager", None, channels_last=False), stock, ours, ours_graph, apart, sums]
    if precision == "fp16":  # in which neurons are loops of torch's operators, taken by estimate
        fused = ours_graph._replace(label="sparsecomp, all neurons, reduce-overhead", neurons="fuse")
        return [stock, stock_graph, ours, ours_graph, fused, apart, sums]
    return [stock, stock_graph, ours, ours_graph, apart, sums]


def measure(net: nn.Module, x: torch.Tensor, precision: str, variant: Variant) -> dict[str, Any]:
    """Milliseconds of a call, seconds of the first one, and the output, of a copy of `net`."""
    model = copy.deepcopy(net)
    if precision == "fp16":
        model, x = model.half(), x.half()
    if variant.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    torch._dynamo.reset()
    ours = variant.backend == "sparsecomp"
    call = model
    if ours:
        options: dict[str, Any] = {"precision": "tf32" if precision == "tf32" else "auto"}
        options |= {"mode": variant.mode or "default", "disable": variant.disable, "neurons": variant.neurons}
        call = torch.compile(model, backend="sparsecomp", options=options)
    elif variant.backend is not None:
        call = torch.compile(model, backend=variant.backend, mode=variant.mode)
    step = _step(model, call, x)
    with torch.no_grad():
        start = time.perf_counter()
        out = step().float().clone()
        torch.cuda.synchronize()
        found: dict[str, Any] = {"compile_s": round(time.perf_counter() - start, 1), "ms": round(eager_ms(step), 3)}
    if ours:
        report = sparsecomp.last_report()
        assert report is not None
        found["sites"] = {"rewritten": len(report.rewritten), "all": len(report.sites)}
    return found | {"out": out}


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
