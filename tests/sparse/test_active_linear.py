"""A linear layer by the weights of active inputs: the operator, its kernels, and the rule that finds the layers."""

import copy
import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from rewriting import rewritten_for
from torch import Tensor, nn

import sparsecomp
import sparsecomp.ops as ops
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.ops.sparse.active_linear import must_read_all
from sparsecomp.passes.cost.active_linear import ActiveLayer, decide
from sparsecomp.passes.engine.rule import Why

NAN, INF = math.nan, math.inf
CARD = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")


def operands(rows: int, k: int, n: int, dtype: torch.dtype, zeros: float = 0.8) -> tuple[Tensor, Tensor, Tensor]:
    """An input with a share of zeros, a weight (k, n) and a bias."""
    random = torch.Generator().manual_seed(rows + k + n)
    x = torch.randn(rows, k, generator=random) * (torch.rand(rows, k, generator=random) >= zeros)
    return x.to(dtype), torch.randn(k, n, generator=random).to(dtype), torch.randn(n, generator=random).to(dtype)


def launched(x: Tensor, weight: Tensor, bias: Tensor | None, device: str) -> Tensor:
    from sparsecomp.lowering.sparse.active_linear import launch_active_linear

    x, weight = x.to(device), weight.to(device)
    found = launch_active_linear(x, weight, must_read_all(weight), None if bias is None else bias.to(device))
    assert found is not None
    return found.cpu()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("k", "n", "dtype"),
    [
        (300, 70, torch.float32), (64, 64, torch.float16), (1, 1, torch.float32), (1000, 130, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("zeros", [0.0, 0.8, 1.0])
def test_kernels_are_the_dense_layer(k, n, dtype, zeros, device):
    x, weight, bias = operands(1, k, n, dtype, zeros)
    exact = x.double() @ weight.double() + bias.double()
    found = launched(x, weight, bias, device).double()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (found - exact).norm() <= tolerance * exact.norm()
    assert torch.equal(launched(x, weight, None, device), launched(x, weight, torch.zeros_like(bias), device))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_what_is_not_finite_is_multiplied(device):
    x, weight, bias = operands(1, 50, 40, torch.float16)
    x[:, 7] = -0.0
    x[0, 3] = NAN
    for value in (None, INF, NAN):
        if value is not None:
            weight[7, 5] = value  # times an input of zero
        exact = x.float() @ weight.float() + bias.float()
        found = launched(x, weight, bias, device).float()
        assert torch.equal(found.isnan(), exact.isnan())
        kept = ~exact.isnan()
        torch.testing.assert_close(found[kept], exact[kept], rtol=2e-3, atol=2e-3)
    assert found[:, 5].isnan().all()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_weights_of_zeros_are_not_read(device):
    """Rows of the weight that must not be read hold NaN, and the operator is told that all are finite."""
    from sparsecomp.lowering.sparse.active_linear import launch_active_linear

    x, weight, bias = (one.to(device) for one in operands(1, 200, 40, torch.float16))
    exact = (x.double() @ weight.double() + bias.double()).cpu()
    weight[x[0] == 0] = NAN
    found = launch_active_linear(x, weight, torch.zeros(1, dtype=torch.int32, device=device), bias)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=2e-3, atol=2e-2)


def test_operands_without_a_kernel_are_multiplied_as_a_whole():
    weight = torch.randn(8, 5, dtype=torch.float64)
    every, bias = must_read_all(weight), torch.randn(5, dtype=torch.float64)
    for shape in ((2, 3, 8), (0, 8), (8,)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(ops.active_linear(x, weight, every, bias), F.linear(x, weight.mT, bias))
    assert must_read_all(weight).tolist() == [0] and must_read_all(weight / 0).tolist() == [1]
    torch.library.opcheck(torch.ops.sparsecomp.active_linear.default, (torch.randn(3, 8).double(), weight, every, bias))


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_kernels_compile_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from sparsecomp.lowering.sparse.kernels.active_linear import (
            active_row_kernel, add_splits_kernel)

        types = dict(x_ptr="*fp16", weight_ptr="*fp16", every_ptr="*i32", sums_ptr="*fp32", bias_ptr="*fp16",
                     out_ptr="*fp16", K="i32", N="i32", span="i32", splits="i32")
        for capability in (80, 90):
            for kernel, constants in ((active_row_kernel, dict(BN=128, BK=64)),
                                      (add_splits_kernel, dict(SPLITS=8, BLOCK=256))):
                build(kernel, types, constants, capability, num_warps=4)
        """
    )


@cache
def layers() -> tuple[nn.Linear, nn.Linear]:
    """Two that no test writes to."""
    torch.manual_seed(0)
    half = {"dtype": torch.float16}
    up, down = nn.Linear(64, 16384, **half), nn.utils.skip_init(nn.Linear, 16384, 4096, **half)
    with torch.no_grad():  # so many random numbers would take seconds
        torch.mul(torch.randn(4096, 1), torch.randn(16384) / 128, out=down.weight)
        down.bias.normal_()
    return up, down


class Mlp(nn.Module):
    """Two layers with what makes zeros between them."""

    def __init__(self, active=F.relu) -> None:
        super().__init__()
        self.up, self.down = layers()
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.active(self.up(x)))


def explained(model: nn.Module, **options):
    """The rule's sites on an H100 that need not be there."""
    with torch.no_grad():
        x = torch.randn(1, 64, dtype=next(model.parameters()).dtype)
        report = sparsecomp.explain(model, x, device="h100", mode="reduce-overhead", **options)
    return [one for one in report.sites if one.rule == "active_linear"]


def sites(model: nn.Module, rows: int = 1, **options):
    """The same of the rewrite alone, which copies no weights."""
    _, report, _ = rewritten_for("h100", model, torch.randn(rows, 64).half(), **options)
    return [one for one in report.sites if one.rule == "active_linear"]


@needs_triton
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("active", "found"),
    [
        (F.relu, True), (lambda x: F.relu(x).square(), True), (lambda x: F.relu(x) * 3.0, True), (F.gelu, False),
        (lambda x: F.relu(x) + 1.0, False),
    ],
    ids=["relu", "relu squared", "relu scaled", "gelu", "relu and one"],
)  # fmt: skip
def test_layers_behind_a_relu_are_found(active, found):
    assert [one.rewritten for one in sites(Mlp(active), frozen=True)] == [True] * found


@needs_triton
def test_what_the_report_says():
    (site,) = explained(Mlp(), frozen=True)
    assert site.implementation == "active" and "its transpose is kept, 128 MiB" in site.reason
    assert site.estimate is not None and site.estimate.gain > 1.03
    (site,) = explained(Mlp())
    assert not site.rewritten and site.why == Why.ACTIVE_AS_WRITTEN.name and "frozen=True" in site.reason


@needs_triton
@pytest.mark.slow(reason="runs layers on a CPU")
def test_what_has_no_kernel_or_was_not_asked_for_is_no_site():
    assert sites(Mlp(), rows=2, frozen=True) == []
    assert sites(Mlp(), frozen=True, implementation="dense") == []
    assert sites(Mlp(), frozen=True, disable=("active_linear",)) == []


def test_a_layer_that_trains_stays_dense():
    model = Mlp()
    report = sparsecomp.explain(model, torch.randn(1, 64).half(), device="h100", frozen=True)
    assert not any(one.rewritten for one in report.sites if one.rule == "active_linear")


@needs_triton
def test_more_zeros_gain_more():
    """Half of the dense layer's time is saved at most."""
    layer = ActiveLayer(28672, 8192, True, torch.float16, 0.1, hosted=False)
    gains = {active: decide(layer._replace(active=active), CARD, H100).gain for active in (0.1, 0.5, None)}
    assert 1.5 < gains[0.1] < 2 and gains[0.5] == gains[None] and 1.03 < gains[0.5] < gains[0.1]
    small = layer._replace(k=512, n=512)
    assert decide(small, CARD, H100).dense and decide(small._replace(hosted=True), CARD, H100).dense


@needs_triton
def test_the_rewritten_graph_gives_the_layer_s_result():
    """As for an H100, run op by op on a CPU."""
    model, x = Mlp(), torch.randn(1, 64).half()
    found, report, _ = rewritten_for("h100", model, x, frozen=True, verify=True)
    with torch.no_grad():
        right = model(x)
    assert [one.implementation for one in report.sites if one.rule == "active_linear"] == ["active"]
    torch.testing.assert_close(found, right, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_layers_follow_their_weights():
    torch.compiler.reset()
    model = copy.deepcopy(Mlp()).cuda()
    options = {"frozen": True, "mode": "reduce-overhead", "density": 0.05}
    compiled = torch.compile(model, backend="sparsecomp", options=options)
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(1, 64, device="cuda").half()
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-2, equal_nan=True)
            if step == 1:
                model.down.weight[3, 8] = INF  # a counted write, which the promise allows to be followed
                model.up.bias[8] = -1e4
    report = sparsecomp.last_report(compiled)
    assert "active" in {one.implementation for one in report.sites if one.rule == "active_linear"}
    assert compiled(x)[:, 3].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_in_a_cuda_graph():
    x, weight, bias = (one.cuda() for one in operands(1, 3000, 1000, torch.float16))
    graph, result = graph_of(lambda: ops.active_linear(x, weight, must_read_all(weight), bias))
    x.copy_(x.roll(1, 1))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result, F.linear(x, weight.mT, bias), rtol=5e-3, atol=5e-3)
