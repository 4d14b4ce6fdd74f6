"""The rule that fuses a sparse product and what follows it: every spelling, what it leaves alone, and its report."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten, site
from torch import Tensor, nn

import sparsecomp
from sparsecomp import SparseTensor, formats, optimize
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.ceilings import Target
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.nn import SparseLinear
from sparsecomp.passes.cost import sparse as sparse_cost
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.sparse import Product, compare, fuses_relu
from sparsecomp.passes.sparse import chain
from sparsecomp.reference.patterns import Layout

pytestmark = pytest.mark.quick_cases(2)


@pytest.fixture(autouse=True)
def small_products_stay_sparse(monkeypatch):
    """What is tested here has a few numbers, for which dense is faster; tests of that say so themselves."""
    decide = lambda product: Decision(f"spmm_{product.layout.format} (reference)", "sparse is faster")  # noqa: E731
    monkeypatch.setattr(chain, "decide", decide)


CARD = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")


class Layers(nn.Module):
    """Weights for a forward that a test gives."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], format: str = "CSR", **layout: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = nn.Linear(8, 6)
        how = layout or {"sparsity": 0.5}
        self.sparse = SparseLinear.from_linear(linear, getattr(formats, format), **how)
        self.linear = nn.Linear(8, 6)
        # a SparseTensor of its own, beside the layer that holds plain tensors
        self.weight = nn.Parameter(SparseTensor(self.sparse.weight.detach().matrix))
        self.linear.weight, self.linear.bias = self.weight, self.sparse.bias
        self.bias = nn.Parameter(torch.randn(3))
        self.norm = nn.LayerNorm(6)
        self.does = forward

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def calls(gm_text: str) -> list[str]:
    """The arguments of each fused operator in a graph's code, from the flag that says linear on."""
    lines = [line for line in gm_text.splitlines() if "sparsecomp.sparse_matmul.default(" in line]
    return [line.split("sparse_matmul.default(")[1].split(");")[0].split(")")[0] for line in lines]


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3))

SPELLINGS: dict[str, tuple[Callable[[Any, Tensor], Any], str, str]] = {
    "module": (lambda m, x: m.linear(x), "bias", "True, 'column', 'none', 1.0"),
    "torch's module": (lambda m, x: F.relu(m.linear(x)), "bias, relu", "True, 'column', 'relu', 1.0"),
    "functional": (lambda m, x: F.linear(x, m.weight).relu(), "relu", "True, 'column', 'relu', 1.0"),
    "in place": (lambda m, x: m.linear(x).relu_(), "bias, relu", "True, 'column', 'relu', 1.0"),
    "operator": (lambda m, x: torch.relu(m.weight @ x.mT), "relu", "False, 'column', 'relu', 1.0"),
    "method": (lambda m, x: x.matmul(m.weight.t()) + m.sparse.bias, "bias", "True, 'column', 'none', 1.0"),
    "transposed": (lambda m, x: F.silu(x[..., :6] @ m.weight), "silu", "True, 'column', 'silu', 1.0"),
    "mm": (lambda m, x: torch.mm(m.weight, x[0].t()) + x[0, :, :6].t(), "residual", "False, 'column', 'none', 1.0"),
    "addmm": (
        lambda m, x: F.gelu(torch.addmm(m.bias, m.weight, x[0].t(), alpha=0.5), approximate="tanh"),
        "bias, gelu_tanh",
        "False, 'column', 'gelu_tanh', 0.5",
    ),
    "addmm, sparse right": (
        lambda m, x: torch.addmm(x[0, :, :6], x[0], m.weight.mT),
        "residual",
        "True, 'column', 'none', 1.0",
    ),
    "residual first": (
        lambda m, x: F.relu(x[..., :6] + m.linear(x)),
        "bias, residual, relu",
        "True, 'column', 'relu', 1.0",
    ),
    "all": (
        lambda m, x: F.gelu((F.linear(x, m.weight) + x[..., :6]) + m.sparse.bias),
        "bias, residual, gelu",
        "True, 'column', 'gelu', 1.0",
    ),
    "added in place": (lambda m, x: m.linear(x).add_(x[..., :6]), "bias, residual", "True, 'column', 'none', 1.0"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_becomes_one_operator(spelling):
    forward, fused, arguments = SPELLINGS[spelling]
    model = Layers(forward)
    with torch.no_grad():
        out, report = rewritten(model, X, implementation="auto", strict=True)
        wanted = model(X)
    assert out.shape == wanted.shape and out.stride() == wanted.stride()
    torch.testing.assert_close(out, wanted)
    found = site(report, "sparse_matmul")
    assert found.rewritten and found.implementation == "csr" and len(report.rewritten) == 1
    assert re.match(r"CSR (6x8|8x6) at 50.0% sparsity by spmm_csr", found.reason)
    assert f"fused with {fused};" in found.reason
    assert len(calls(report.graph_after)) == 1 and arguments in calls(report.graph_after)[0]


@pytest.mark.parametrize(
    ("format", "layout", "kernel"),
    [("COO", {}, "csr"), ("CSC", {}, "csr"), ("BSR", {"block": 2, "sparsity": 0.5}, "bsr"),
     ("BCSC", {"block": 2, "sparsity": 0.5}, "bsr"), ("NM", {"n": 2, "m": 4}, "nm")],
)  # fmt: skip
def test_every_format_through_the_backend_with_gradients(format, layout, kernel):
    model = Layers(lambda m, x: torch.relu(m.linear(x) + x[..., :6]), format, **layout)
    compiled = torch.compile(model, backend="sparsecomp", fullgraph=True)
    grads = []
    for call in (compiled, model):
        x = X.clone().requires_grad_()
        out = call(x)
        out.square().sum().backward()
        grads.append((out, x.grad, model.weight.grad.to_dense(), model.sparse.bias.grad))
        model.zero_grad()
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted)
    _, report = rewritten(model, X, implementation="auto")
    assert f"by spmm_{kernel} (reference), fused with bias, residual, relu" in site(report, "sparse_matmul").reason
    assert site(report, "sparse_matmul").implementation == kernel


LEFT: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "read twice": (lambda m, x: (lambda y: F.relu(y) + y.sum())(m.linear(x)), "bias;"),
    "gelu that needs a gradient": (lambda m, x: F.gelu(m.linear(x)), "bias;"),
    "added to itself": (lambda m, x: (lambda y: y + y)(m.linear(x)), "bias;"),
    "broadcast": (lambda m, x: m.linear(x) + x[:1, :, :6], "bias;"),
    "another activation": (lambda m, x: torch.tanh(m.linear(x)), "bias;"),
    "scaled sum": (lambda m, x: torch.add(m.linear(x), x[..., :6], alpha=2), "bias;"),
    "added to in place": (lambda m, x: x[..., :6].clone().add_(m.linear(x)), "bias;"),
    "second residual": (lambda m, x: m.linear(x) + x[..., :6] + x[..., 2:], "bias, residual;"),
    "layer norm between": (lambda m, x: F.relu(m.norm(m.linear(x))), "bias;"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_cannot_be_fused_stays_outside(what):
    forward, fused = LEFT[what]
    model = Layers(forward)
    out, report = rewritten(model, X, implementation="auto", strict=True)
    torch.testing.assert_close(out, model(X))
    assert f"fused with {fused}" in site(report, "sparse_matmul").reason
    out.sum().backward()
    found = model.weight.grad.to_dense()
    model.zero_grad()
    model(X).sum().backward()
    torch.testing.assert_close(found, model.weight.grad.to_dense())


def test_an_operand_that_changes_meanwhile_is_read_before():
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.clone()
        y = m.linear(x)
        x.mul_(2)
        return F.relu(y + x[..., :6])

    model = Layers(forward)
    out, report = rewritten(model, X, implementation="auto", strict=True)
    torch.testing.assert_close(out, model(X))
    assert "written to before the result is complete" in site(report, "sparse_matmul").reason


def test_what_stays_as_written_says_why():
    model = Layers(lambda m, x: torch.addmm(m.bias, m.weight, x[0].t(), beta=0.5))
    out, report = rewritten(model, X, implementation="auto", strict=True)
    torch.testing.assert_close(out, model(X))
    assert site(report, "sparse_matmul").reason == (
        "the sparse product stays as it was written: addmm in this form is not fused"
    )
    model = Layers(lambda m, x: m.linear(x))
    _, report = rewritten(model, X, implementation="dense")
    assert "implementation='dense'" in site(report, "sparse_matmul").reason
    _, report = rewritten(model, X, implementation="auto", disable=("sparse_matmul",))
    assert not [found for found in report.sites if found.rule == "sparse_matmul"]


# what is fused: a float32 bias or residual outside of the product makes torch's sum float32
AUTOCAST = {
    "torch's module": ", fused with bias, relu;", "method": "(reference);", "transposed": "(reference);",
    "addmm": ", fused with bias;", "addmm, sparse right": ", fused with residual;",
    "residual first": ", fused with bias;",
}  # fmt: skip


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_the_call_or_within_it(inside, dense, monkeypatch):
    """The fused operator gives the dtype that torch gives, and half precision rounds once."""
    if dense:
        monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    around = torch.autocast("cpu", torch.bfloat16)
    for spelling, fused in AUTOCAST.items():
        forward = SPELLINGS[spelling][0]

        def within(m: Any, x: Tensor, forward: Callable[[Any, Tensor], Any] = forward) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(m, x)

        model, exact = Layers(within if inside else forward), Layers(forward).double()
        exact.linear.weight = exact.weight
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            out, report = rewritten(model, X, implementation="auto", strict=True, verify=not inside)
        with around:
            eager = Layers(forward)(X)
        wanted = exact(X.double())
        found = site(report, "sparse_matmul")
        assert found.rewritten and found.implementation == ("dense" if dense else "csr"), (spelling, found)
        assert dense or fused in found.reason
        assert out.dtype is eager.dtype and (out - wanted).norm() <= 2**-7 * wanted.norm(), spelling
        out.sum().backward()
        assert model.weight.grad is not None and model.weight.grad.dtype is torch.float32


def test_autocast_that_ends_before_the_activation():
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m.linear(x)
        z = m.linear(x)
        with torch.autocast("cpu", torch.bfloat16):
            return F.relu(y) + F.relu(z)

    model = Layers(forward)
    out, report = rewritten(model, X, implementation="auto", strict=True, verify=False)
    first, second = (found for found in report.sites if found.rule == "sparse_matmul")
    assert first.rewritten and second.rewritten and "relu" not in first.reason + second.reason
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, model(X), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("op_by_op")
def test_a_batch_of_another_size_needs_no_other_graph():
    model = Layers(lambda m, x: F.relu(m.linear(x) + x[..., :6]))
    compiled = torch.compile(model, backend="sparsecomp", fullgraph=True, dynamic=True)
    for rows in (2, 5, 7):
        x = torch.randn(rows, 3, 8)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("spelling", ["torch's module", "all", "addmm", "transposed", "added in place"])
def test_dense_where_that_is_faster(spelling, monkeypatch):
    monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    model = Layers(SPELLINGS[spelling][0])
    out, report = rewritten(model, X, implementation="auto", strict=True)
    torch.testing.assert_close(out, model(X))
    found = site(report, "sparse_matmul")
    assert found.rewritten and found.implementation == "dense" and "dense is faster" in found.reason
    assert "sparse_to_dense" in report.graph_after and not calls(report.graph_after)
    out.sum().backward()
    grad = model.weight.grad
    assert isinstance(grad, SparseTensor)
    model.zero_grad()
    model(X).sum().backward()
    torch.testing.assert_close(grad.to_dense(), model.weight.grad.to_dense())


def test_optimize_rewrites_op_by_op():
    model = Layers(lambda m, x: F.gelu(m.linear(x)) + m.linear(-x)).eval().requires_grad_(False)
    better = optimize(model, X)
    torch.testing.assert_close(better(X), model(X))
    reasons = [found.reason for found in better.report.rewritten]
    assert any("fused with bias, gelu" in reason for reason in reasons)
    assert any("fused with bias, residual" in reason for reason in reasons)
    with torch.no_grad():
        model.weight.mul_(2)
    torch.testing.assert_close(better(X), model(X))


def product(share: float, n: int, dtype: torch.dtype, format: str = "csr", size: int = 4096) -> Product:
    """A linear layer of a square weight that stores this share, in blocks of 32 by 32 for bsr."""
    block = {"csr": (1, 1), "bsr": (32, 32), "nm": (2, 4)}[format]
    entries = math.ceil(share * size * size / (1024 if format == "bsr" else 1))
    layout = Layout(format, block, (size, size))
    return Product(torch.device("cuda"), layout, n, 1, entries, dtype, True, True, False, "relu", "W")


def test_the_estimate_is_sure_at_the_ends():
    """Where the share of nonzeros and the width leave no doubt: dense for many of both, sparse for few."""
    pytest.importorskip("triton")
    half, full = torch.float16, torch.float32
    for share, n, dtype, format, dense in (
        (0.5, 4096, half, "csr", True), (0.1, 4096, half, "csr", True), (0.01, 16, half, "csr", False),
        (0.01, 512, full, "csr", False), (0.05, 512, half, "bsr", False), (0.5, 4096, half, "bsr", True),
    ):  # fmt: skip
        decision = compare(product(share, n, dtype, format), CARD, H100)
        assert decision.dense is dense, (share, n, dtype, format, decision)
        assert "estimated" in decision.reason and decision.reason.startswith("estimated") is not dense
    nothing = compare(product(0.0, 512, full), CARD, H100)
    assert not nothing.dense and nothing.gain > 1
    assert sparse_cost.dense_seconds(product(0.5, 4096, half), H100) > 2 * 4096**3 / H100.half


def test_a_way_that_gives_the_host_more_to_do_must_save_the_device_more_than_a_call_takes():
    """A product in halves takes the device half as long as dense and needs more launches: alone it gains nothing,
    among many others, which keep the device busy, it does; and in a CUDA graph the host does not count."""
    pytest.importorskip("triton")
    alone = product(0.5, 1024, torch.float32, size=1280)._replace(constant=True, replayed=False)
    assert compare(alone, CARD, H100).dense
    busy = compare(alone._replace(products=64), CARD, H100)
    assert busy.dense is False and busy.gain > 1
    assert compare(alone._replace(replayed=True), CARD, H100).gain >= busy.gain


def test_a_copy_that_is_compared_costs_what_is_read_and_a_launch():
    """By hand, of 10 % of 4096²: values and columns at 0.9 of the bandwidth, a row as 2 kB, and a launch's time."""
    pytest.importorskip("triton")
    for dtype, size in ((torch.float16, 2), (torch.float32, 4)):
        written = product(0.1, 16, dtype)
        kept, compared = (written._replace(**{name: True}) for name in ("constant", "compared"))
        more = sparse_cost.dense_seconds(compared, H100) - sparse_cost.dense_seconds(kept, H100)
        entries = math.ceil(0.1 * 4096**2)
        assert more == pytest.approx((entries * (size + 4) + 4096 * 2048) / (0.9 * 3.0e12) + 2e-6)
        assert sparse_cost.dense_seconds(compared, H100) < sparse_cost.dense_seconds(written, H100)


def test_time_is_what_a_caller_waits():
    """By hand: the device 30 us, the host 20 us and 45 us for the call, or half of them with two products."""
    time, call = Time(30e-6, 20e-6), product(0.5, 64, torch.float32)
    assert call.waited(time) == pytest.approx(30e-6)
    assert call._replace(replayed=False).waited(time) == pytest.approx((30e-6 + 65e-6) / 2)
    assert call._replace(replayed=False, products=2).waited(time) == pytest.approx((30e-6 + 42.5e-6) / 2)
    assert call._replace(replayed=False, trained=True).waited(time) == pytest.approx((30e-6 + 420e-6) / 2)
    assert call._replace(replayed=False).waited(time.plus(time)) == pytest.approx((60e-6 + 85e-6) / 2)


def test_a_training_step_counts_what_autograd_takes_of_each_operator():
    """By hand, of 4 % of 256², whose host decides: 24 us for each of three products or operators of ours, and of two
    more that write the weight out and sample its gradient."""
    pytest.importorskip("triton")
    layer = product(0.04, 16, torch.float16, size=256)._replace(trained=True, replayed=False)
    decision = compare(layer, CARD, H100)
    assert not decision.dense
    besides = 400e-6 / 2
    plain = sparse_cost.dense_layer_seconds(layer._replace(target=Target(CARD, H100)))
    assert plain == pytest.approx(besides + 3 * (16e-6 + 24e-6) + 8e-6)
    assert decision.seconds["dense"] == pytest.approx(besides + 3 * 16e-6 + 8e-6 + 2 * 13e-6 + 5 * 24e-6)


def test_a_relu_is_done_in_the_product_where_that_costs_the_device_nothing():
    def fused(dtype, rows, **how):
        return fuses_relu(product(0.5, rows, dtype, size=1024)._replace(replayed=False, **how), H100)

    assert fused(torch.float32, 128) and not fused(torch.float32, 2048)  # 7 us of the device, and 88
    assert fused(torch.float16, 64) and fused(torch.float16, 2048) and not fused(torch.float64, 64)
    assert fused(torch.float32, 128, products=5)  # three times 7.5 us are less than 16 and 9
    assert not fused(torch.float32, 128, products=8)  # and more than 16 and 5.6
    for dtype in (torch.float16, torch.float32):
        assert not fused(dtype, 64, bias=False) and not fused(dtype, 64, trained=True)
        assert not fused(dtype, 64, linear=False)
    assert not fuses_relu(product(0.5, 64, torch.float32, size=1024), H100)  # in a graph the host does not count


def test_the_numbers_of_a_product_are_the_tensors():
    dense = torch.zeros(6, 8)
    dense[0] = 1
    out = torch.empty(2, 3, 6)
    found = Product.of_tensor(SparseTensor.from_dense(dense), [2, 3, 8], True, out, True, False, "relu", trained=False)
    assert (found.layout.format, found.m, found.k, found.n, found.batch, found.entries) == ("csr", 6, 8, 6, 1, 8)
    assert found.layout.skews[0] == "skewed"  # one row of 8 and five of none: deviation over mean is sqrt(5)
    blocks = SparseTensor.from_dense(torch.ones(6, 8), formats.BSR, block=(2, 4))
    found = Product.of_tensor(blocks.t(), [4, 6, 5], False, torch.empty(4, 8, 5), False, False, "none", trained=True)
    assert (found.layout.format, found.layout.block, found.layout.shape) == ("bsr", (4, 2), (8, 6))
    assert (found.n, found.batch) == (5, 4)
    assert found.entries == 6 and "at 0.0% sparsity" in found.described


@pytest.mark.parametrize("autocast", [False, True])
def test_spikes_into_a_sparse_weight_are_a_sparse_product(autocast):
    layer = SparseLinear.from_linear(nn.Linear(64, 32), sparsity=0.9)
    options = {"implementation": "binary", "strict": True}
    compiled = torch.compile(lambda x: layer((x >= 0.5).to(x.dtype)), backend="sparsecomp", options=options)
    x = torch.rand(8, 64)
    expected = (x >= 0.5).double() @ layer.weight.to_dense().double().T + layer.bias.double()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = compiled(x)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2 if autocast else 1e-6)
    sites = {found.rule: found for found in sparsecomp.last_report().sites}
    assert sites["sparse_linear"].implementation == "csr"


def test_matrices_of_other_numbers_of_entries_are_fused_too():
    """From the second on, sizes of the arrays are symbols of the graph."""
    compiled = torch.compile(
        lambda x, weight: F.relu(F.linear(x, weight)), backend="sparsecomp", fullgraph=True, options={"strict": True}
    )
    for stored in (2, 3, 5):
        dense = torch.zeros(6, 8)
        dense[:, :stored] = torch.arange(1.0, 6 * stored + 1).view(6, stored)
        torch.testing.assert_close(compiled(X, SparseTensor.from_dense(dense)), F.relu(X @ dense.T))
        assert [site.implementation for site in sparsecomp.last_report().sites] == ["csr"]
