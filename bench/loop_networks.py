"""Whole networks as a user calls them: calls and training steps in loops, host included, beside stock compile.

TF32 is allowed to both. Networks in float16 are called only: training in it needs autocast. Spiking networks keep their
state as their library has it: it is reset before each call, in the time that is taken. Their batch-norms have the
statistics of the input, so that neurons fire as trained ones do.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsecomp
from bench.masked.masked_linear import MaskedLinear
from bench.parallel import gathered, measured
from bench.spiking.networks import DeadNetworkError, firing_rates
from bench.timing import MODES, guarded, time_rivals
from sparsecomp.nn import SparseLinear

_LEAST_RATE = 0.02


class Network(NamedTuple):
    """How to make a network, the shape of its input, whether it spikes (over time, in the first axis), and in what."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    spiking: bool
    dtype: torch.dtype = torch.float32


class Mlp(nn.Module):
    """Four layers of 2048 at 90 %, each followed by GELU and a residual: sparse layers, or masked weights."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        linears = [nn.Linear(2048, 2048) for _ in range(4)]
        if masked:
            self.layers = nn.ModuleList(MaskedLinear(linear, _largest(linear)) for linear in linears)
        else:
            self.layers = nn.ModuleList(SparseLinear.from_linear(linear, sparsity=0.9) for linear in linears)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 2048) to the same."""
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


def _largest(linear: nn.Linear) -> Tensor:
    """The mask of a tenth of the weights."""
    weight = linear.weight.detach().abs()
    return weight >= weight.flatten().kthvalue(int(0.9 * weight.numel())).values


def _spikingjelly(module: str, name: str, **arguments: Any) -> nn.Module:
    import importlib

    from spikingjelly.activation_based import functional, neuron

    torch.manual_seed(0)
    models = importlib.import_module(f"spikingjelly.activation_based.model.{module}")
    net = getattr(models, name)(spiking_neuron=neuron.LIFNode, **arguments)
    functional.set_step_mode(net, "m")
    return net


NETWORKS = {
    "sew_resnet18": Network(
        partial(_spikingjelly, "sew_resnet", "sew_resnet18", cnf="ADD"), (4, 32, 3, 112, 112), True
    ),
    "sew_resnet34": Network(
        partial(_spikingjelly, "sew_resnet", "sew_resnet34", cnf="ADD"), (4, 32, 3, 112, 112), True
    ),
    "spiking_resnet34": Network(
        partial(_spikingjelly, "spiking_resnet", "spiking_resnet34"), (4, 32, 3, 112, 112), True
    ),
    "spiking_vgg16": Network(partial(_spikingjelly, "spiking_vgg", "spiking_vgg16_bn"), (4, 64, 3, 32, 32), True),
    "spikformer": Network(partial(_spikingjelly, "spikformer", "spikformer_cifar10"), (4, 64, 3, 32, 32), True),
    "sparse_mlp_16": Network(partial(Mlp, False), (16, 2048), False),
    "sparse_mlp_2048": Network(partial(Mlp, False), (2048, 2048), False),
    "masked_mlp": Network(partial(Mlp, True), (2048, 2048), False),
}  # fmt: skip
NETWORKS |= {
    f"{name}_float16": NETWORKS[name]._replace(dtype=torch.float16)
    for name in ("sew_resnet34", "spiking_vgg16", "spikformer")
}
"""Dense rivals: the network itself under stock compile; of the sparse ones, the same with dense layers."""


def run(
    names: Iterable[str] = tuple(NETWORKS), modes: tuple[str, ...] = MODES,
    trainings: tuple[bool, ...] = (False, True), workers: int = 1,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Milliseconds of each network in each mode by `stock`, `sparsecomp` and, without gradients, `frozen`.

    The rivals take turns. A network's row comes once for each mode, with what is known of it by then.
    """
    cases = [
        (name, training, mode)
        for name, training, mode in itertools.product(names, trainings, modes)
        if not training or NETWORKS[name].dtype is torch.float32
    ]
    for row in gathered(measured(prepared, cases, min(workers, len(cases)), batch=1), ("network", "training")):
        print(row, flush=True)
        yield row


def prepared(case: tuple[str, bool, str]) -> Callable[[], dict[str, Any]]:
    """What measures a network in one mode, compiled; of a dead one, nothing."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    name, training, mode = case
    network = NETWORKS[name]
    row: dict[str, Any] = {"network": name, "shape": list(network.shape), "training": training, "ms": {}}
    calls: dict[str, Callable[[], Any]] = {}

    def prepare() -> None:
        net, x = _prepared(network)
        if network.spiking:
            _rates(row, net, x)
        calls.update(_compiled(row, network, net, x, training, mode))

    def measure() -> dict[str, Any]:
        if calls:
            guarded(row, mode, partial(time_rivals, row, mode, calls, training))
        return row

    guarded(row, mode, prepare)
    return measure


def _prepared(network: Network) -> tuple[nn.Module, Tensor]:
    net, x = network.make().cuda(), torch.rand(network.shape, device="cuda")
    if len(network.shape) > 2:
        net = net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None
    if norms:
        with torch.no_grad():
            net.train()(x)
    for norm in norms:
        norm.momentum = 0.1
    return net.to(network.dtype), x.to(network.dtype)


def _rates(row: dict[str, Any], net: nn.Module, x: Tensor) -> None:
    from spikingjelly.activation_based import neuron

    neurons = {name: module for name, module in net.named_modules() if isinstance(module, neuron.LIFNode)}
    with torch.no_grad():
        rates = list(firing_rates(net.eval(), neurons, x).values())
    row["rates"] = {"least": min(rates), "mean": sum(rates) / len(rates), "most": max(rates)}
    if row["rates"]["mean"] < _LEAST_RATE:
        raise DeadNetworkError(f"{row['rates']}: its layers hardly fire, so its timing would mean nothing")


def _compiled(
    row: dict[str, Any], network: Network, net: nn.Module, x: Tensor, training: bool, mode: str
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {}
    with torch.set_grad_enabled(training):
        for which in ("stock", "sparsecomp") if training else ("stock", "sparsecomp", "frozen"):
            model = copy.deepcopy(net).train(training)
            if which == "stock":
                _make_dense(model)
            calls[which] = call = _call(which, mode, network, model, x, training)
            for _ in range(4):
                call()
            if which != "stock":
                report = sparsecomp.last_report()
                assert report is not None
                row[f"sites, {which}, {mode}"] = f"{len(report.rewritten)} of {len(report.sites)}"
    return calls


def _make_dense(model: nn.Module) -> None:
    """Dense layers in place of sparse ones, with their zeros."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, SparseLinear):
                dense = nn.Linear(child.in_features, child.out_features, device=child.values.device)
                with torch.no_grad():
                    dense.weight.copy_(child.weight.detach().to_dense())
                    if child.bias is not None:
                        dense.bias.copy_(child.bias)
                setattr(module, name, dense)


def _call(
    which: str, mode: str, network: Network, model: nn.Module, x: Tensor, training: bool
) -> Callable[[], Any]:  # fmt: skip
    if which == "stock":
        compiled = torch.compile(model, mode=mode)
    else:
        precision = "tf32" if network.dtype is torch.float32 else "auto"
        options = {"frozen": which == "frozen", "mode": mode, "precision": precision}
        compiled = torch.compile(model, backend="sparsecomp", options=options)
    reset: Callable[[nn.Module], Any] = lambda model: None  # noqa: E731
    if network.spiking:
        from spikingjelly.activation_based import functional

        reset = functional.reset_net
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def call() -> Any:
        reset(model)
        out = compiled(x)
        if training:
            out.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return out

    return call
