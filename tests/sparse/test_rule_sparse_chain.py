"""What joins a sparse product, case by case, for both rules and both ways to run it: results are eager's."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Examples, rewritten
from torch import Tensor, fx, nn

from sparsecomp import SparseTensor
from sparsecomp.formats import CSR
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.ceilings import Target
from sparsecomp.ops import sparse_matmul
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.sparse import chain, linear, matmul
from sparsecomp.reference.patterns import Layout

pytestmark = pytest.mark.quick_cases(5)

DENSE, SPARSE = "dense is faster", "sparse is faster"


class Net(nn.Module):
    """A sparse weight (6, 8), as a layer's arrays or as a tensor, for a forward that a test gives."""

    def __init__(self, forward: Callable[..., Any], product: bool, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.does, self.product = forward, product
        dense = torch.randn(6, 8) * (torch.rand(6, 8) > 0.5)
        self.bias = nn.Parameter(torch.randn(6)) if bias else None
        if product:
            self.weight = nn.Parameter(SparseTensor.from_dense(dense))
        else:
            matrix = CSR.from_dense(dense)
            self.values, self.pointers, self.indices = nn.Parameter(matrix.values), matrix.pointers, matrix.indices

    def layer(self, x: Tensor) -> Tensor:
        if self.product:
            return F.linear(x, self.weight, self.bias)
        layout = Layout("csr", (1, 1), (6, 8)).written()
        pattern = [self.pointers, self.indices]
        return torch.ops.sparsecomp.sparse_linear.default(
            x, self.values, pattern, self.bias, None, layout, False, "none", ""
        )

    def forward(self, x: Tensor, r: Tensor, b: Tensor) -> Any:
        return self.does(self.layer, x, r, b)


def told(
    model: Callable[..., Any], rule: Any, *inputs: Any, target: Any = None, into: list[fx.GraphModule] | None = None,
    **options: Any,
) -> list[str]:  # fmt: skip
    """What a rule says of each site of a graph, whose results stay; what is fused where it is rewritten."""
    gm = fx.symbolic_trace(model)
    with torch.no_grad():
        Examples(gm).run(*copies(inputs))
        expected = model(*copies(inputs))
    report = pipeline.run_rules(gm, Options(strict=True, **options), rules=[rule], target=target)
    if into is not None:
        into.append(gm)
    with torch.no_grad():
        # products are of float32, whatever is added to them
        torch.testing.assert_close(gm(*copies(inputs)), expected, rtol=1.3e-6, atol=1e-5)
    names = [re.search(r"fused with (.*?);", site.reason) for site in report.sites]
    return [
        (name[1] if name else site.implementation) if site.rewritten else site.reason
        for site, name in zip(report.sites, names, strict=True)
    ]


def copies(inputs: Any) -> list[Any]:
    return [one if isinstance(one, SparseTensor) else one.detach().clone().requires_grad_(one.requires_grad)
            for one in inputs]  # fmt: skip


@pytest.fixture(params=[SPARSE, DENSE])
def faster(request, monkeypatch):
    def decide(product: Any) -> Decision:
        return Decision("dense" if request.param == DENSE else "spmm_csr (reference)", request.param)

    monkeypatch.setattr(chain, "decide", decide)
    return request.param


def _bias_written(layer: Any, x: Tensor, r: Tensor, b: Tensor) -> Tensor:
    y = layer(x)
    b.mul_(2)
    return y + b


def _residual_written(layer: Any, x: Tensor, r: Tensor, b: Tensor) -> Tensor:
    y = layer(x)
    r.mul_(2)
    return y + r


def _written_before(layer: Any, x: Tensor, r: Tensor, b: Tensor) -> Tensor:
    r.mul_(2)
    x.mul_(2)
    return layer(x) + r


def _written_behind(layer: Any, x: Tensor, r: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = layer(x) + r
    return y, x.mul_(2)


def _twice_read(layer: Any, x: Tensor, r: Tensor, b: Tensor) -> Tensor:
    y = layer(x)
    return F.relu(y) + y


def _read_again_behind(layer: Any, x: Tensor, r: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = layer(x) + r
    return F.relu(y), y


def _reshaped(layer: Any, x: Tensor, r: Tensor, b: Tensor) -> Tensor:
    r = r + 0
    r.unsqueeze_(0)
    r.squeeze_(0)
    return layer(x) + r


UNKNOWN = "the shape of the input or the weight is unknown"
WRITTEN = "the sparse product stays as it was written: an operand is written to before the result is complete"
FUSED: dict[str, tuple[Callable[..., Any], str]] = {
    # of a layer, x (2, 3, 8), r (2, 3, 6) and b (6,): what is fused, "" for nothing
    "alone": (lambda layer, x, r, b: layer(x), ""),
    "relu": (lambda layer, x, r, b: F.relu(layer(x)), "relu"),
    "relu in place": (lambda layer, x, r, b: layer(x).relu_(), "relu"),
    "relu by an argument": (lambda layer, x, r, b: F.relu(layer(x), inplace=True), "relu"),
    "gelu": (lambda layer, x, r, b: F.gelu(layer(x)), "gelu"),
    "gelu by tanh": (lambda layer, x, r, b: F.gelu(layer(x), approximate="tanh"), "gelu_tanh"),
    "silu": (lambda layer, x, r, b: F.silu(layer(x)), "silu"),
    "sigmoid": (lambda layer, x, r, b: layer(x).sigmoid(), "sigmoid"),
    "tanh": (lambda layer, x, r, b: torch.tanh(layer(x)), "tanh"),
    "another activation": (lambda layer, x, r, b: F.elu(layer(x)), ""),
    "two activations": (lambda layer, x, r, b: F.silu(F.relu(layer(x))), "relu"),
    "residual": (lambda layer, x, r, b: layer(x) + r, "residual"),
    "residual in front": (lambda layer, x, r, b: r + layer(x), "residual"),
    "residual in place": (lambda layer, x, r, b: layer(x).add_(r), "residual"),
    "into the residual": (lambda layer, x, r, b: r.clone().add_(layer(x)), ""),
    "into a given tensor": (lambda layer, x, r, b: torch.add(layer(x), r, out=torch.empty_like(r)), ""),
    "activation into a given one": (lambda layer, x, r, b: torch.add(layer(x), r, out=x[..., :6].clone()).relu(), ""),
    "twice the residual": (lambda layer, x, r, b: torch.add(layer(x), r, alpha=2), ""),
    "a number": (lambda layer, x, r, b: layer(x) + 2, ""),
    "itself": (lambda layer, x, r, b: (lambda y: y + y)(layer(x)), ""),
    "two residuals": (lambda layer, x, r, b: layer(x) + r + r, "residual"),
    "bias": (lambda layer, x, r, b: layer(x) + b, "bias"),
    "bias in front": (lambda layer, x, r, b: b + layer(x), "bias"),
    "two biases": (lambda layer, x, r, b: layer(x) + b + b, "bias"),
    "bias of one number": (lambda layer, x, r, b: layer(x) + b[:1], ""),
    "bias by row": (lambda layer, x, r, b: layer(x) + b[:3, None], ""),
    "bias, then residual": (lambda layer, x, r, b: layer(x) + b + r, "bias, residual"),
    "residual, then bias": (lambda layer, x, r, b: r + layer(x) + b, "bias, residual"),
    "all": (lambda layer, x, r, b: F.relu(b + (r + layer(x))), "bias, residual, relu"),
    "activation first": (lambda layer, x, r, b: F.relu(layer(x)) + r, "relu"),
    "of one row": (lambda layer, x, r, b: layer(x[0, 0]) + b, "bias"),
    "of one row, both": (lambda layer, x, r, b: layer(x[0, 0]) + b + r[0, 0], "bias"),
    "wider residual": (lambda layer, x, r, b: layer(x) + r.double(), ""),
    "wider bias": (lambda layer, x, r, b: layer(x) + b.double(), ""),
    "narrower residual": (lambda layer, x, r, b: layer(x) + r.half(), ""),
    "broadcast residual": (lambda layer, x, r, b: layer(x) + r[:1], ""),
    "broadcast product": (lambda layer, x, r, b: layer(x[:1]) + r, ""),
    "broadcast row": (lambda layer, x, r, b: layer(x[0, 0]) + r, ""),
    "reshaped residual": (_reshaped, ""),
    "reshaped sum": (lambda layer, x, r, b: (layer(x) + r).unsqueeze_(0), ""),
    "reshaped product": (lambda layer, x, r, b: layer(x).unsqueeze_(0), UNKNOWN),
    "read twice": (_twice_read, ""),
    "read again behind": (_read_again_behind, "residual"),
    "bias written": (_bias_written, WRITTEN),
    "residual written": (_residual_written, WRITTEN),
    "written before": (_written_before, "residual"),
    "written behind": (_written_behind, "residual"),
}  # fmt: skip


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("product", [True, False], ids=["product", "layer"])
@pytest.mark.parametrize("name", FUSED)
def test_what_is_fused(name, product, faster):
    model, fused = FUSED[name]
    random = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, generator=random) for size in ((2, 3, 8), (2, 3, 6), (6,))]
    with torch.no_grad():
        found = told(Net(model, product), matmul.RULE if product else linear.RULE, *inputs)
    taken = "dense" if faster == DENSE else fused or "csr"
    assert found == [fused if fused in (WRITTEN, UNKNOWN) else taken]


def _named(w: Any, x: Tensor) -> Tensor:
    rest: dict[str, Any] = {"bias_axis": "column", "activation": "none", "scale": 1.0, "dtype": None}
    return torch.ops.sparsecomp.sparse_matmul.default(w, x, None, None, linear=True, **rest)


NOT_FUSED = "the sparse product stays as it was written: {} in this form is not fused"
FORMS: dict[str, tuple[Callable[..., Any], str | None]] = {
    # of a sparse w (6, 8), x (3, 8), r (3, 6) and b (6,): what is fused, None for no site
    "weight on the right": (lambda w, x, r, b: F.relu(x @ w.t()), "relu"),
    "weight on the left": (lambda w, x, r, b: F.relu(w @ x.t()), "relu"),
    "as it is on the right": (lambda w, x, r, b: F.relu(r @ w), "relu"),
    "mm": (lambda w, x, r, b: torch.mm(w, x.t()) + b[:3], "bias"),
    "residual of the left": (lambda w, x, r, b: (w @ x.t()) + r.t(), "residual"),
    "bias by row of the left": (lambda w, x, r, b: (w @ x.t()) + b[:, None], "csr"),
    "of a vector": (lambda w, x, r, b: w @ x[0], NOT_FUSED.format("matmul")),
    "vector on the left": (lambda w, x, r, b: F.relu(b @ w), "relu"),
    "linear with a bias": (lambda w, x, r, b: F.linear(x, w, b), "bias"),
    "linear and a bias": (lambda w, x, r, b: F.linear(x, w) + b, "bias"),
    "addmm of a bias": (lambda w, x, r, b: torch.addmm(b, x, w.t()), "bias"),
    "addmm of a residual": (lambda w, x, r, b: torch.addmm(r, x, w.t(), alpha=0.5), "residual"),
    "addmm on the left": (lambda w, x, r, b: torch.addmm(r.t(), w, x.t(), alpha=3).relu(), "residual, relu"),
    "addmm and a residual": (lambda w, x, r, b: torch.addmm(b, x, w.t(), alpha=2) + r, "bias, residual"),
    "addmm of a number a row": (lambda w, x, r, b: torch.addmm(r[:, :1], x, w.t()), NOT_FUSED.format("addmm")),
    "addmm of half": (lambda w, x, r, b: torch.addmm(r, x, w.t(), beta=0.5), NOT_FUSED.format("addmm")),
    "addmm times a tensor": (lambda w, x, r, b: torch.addmm(r, x, w.t(), alpha=b[0]), NOT_FUSED.format("addmm")),
    "our operator": (lambda w, x, r, b: F.relu(sparse_matmul(w, x, linear=True)), "relu"),
    "our operator on the left": (lambda w, x, r, b: F.silu(sparse_matmul(w, x.t())), "silu"),
    "our operator, scaled": (lambda w, x, r, b: sparse_matmul(w, x, b, linear=True, scale=0.5) + r, "bias, residual"),
    "our operator, both": (lambda w, x, r, b: sparse_matmul(w, x, b, r, linear=True).relu(), "bias, residual, relu"),
    "our operator, active": (
        lambda w, x, r, b: sparse_matmul(w, x, linear=True, activation="relu") + r, "relu",
    ),
    "our operator, by row": (lambda w, x, r, b: F.relu(sparse_matmul(w, x.t(), b, bias_axis="row")), None),
    "our operator, wider": (lambda w, x, r, b: sparse_matmul(w, x, linear=True, dtype=torch.float64).relu(), None),
    "our operator, by names": (lambda w, x, r, b: F.relu(_named(w, x)), None),
    "our operator, dense": (lambda w, x, r, b: F.relu(sparse_matmul(r[:2], b[:, None])), None),
    "no sparse operand": (lambda w, x, r, b: F.relu(x @ x.t()), None),
}  # fmt: skip


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("name", FORMS)
def test_which_products_are_taken(name, faster):
    model, fused = FORMS[name]
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 8, generator=random) * (torch.rand(6, 8, generator=random) > 0.5)
    inputs = [torch.randn(size, generator=random) for size in ((3, 8), (3, 6), (6,))]
    with torch.no_grad():
        found = told(model, matmul.RULE, SparseTensor.from_dense(weight), *inputs)
    refused = fused is not None and "not fused" in fused
    assert found == ([] if fused is None else [fused] if refused or faster == SPARSE else ["dense"])


@pytest.mark.parametrize("trained", ["weight", "x", "r", "b", None])
@pytest.mark.parametrize("product", [True, False], ids=["product", "layer"])
def test_a_smooth_activation_stays_outside_where_a_gradient_needs_what_is_before_it(product, trained, monkeypatch):
    monkeypatch.setattr(chain, "decide", lambda product: Decision("spmm_csr (reference)", SPARSE))
    net = Net(lambda layer, x, r, b: F.silu(layer(x) + b + r), product)
    net.requires_grad_(trained == "weight")
    inputs = [torch.ones(size, requires_grad=trained == name) for name, size in
              (("x", (2, 3, 8)), ("r", (2, 3, 6)), ("b", (6,)))]  # fmt: skip
    rule = matmul.RULE if product else linear.RULE
    assert told(net, rule, *inputs) == ["bias, residual" + ("" if trained else ", silu")]
    with torch.no_grad():
        assert told(net, rule, *inputs) == ["bias, residual, silu"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("product", [False, True])
def test_what_follows_where_gradients_are_switched_stays_outside(product, faster):
    """Moved behind the switch the product would give its input a gradient that it has not as written."""

    def does(layer: Callable[[Tensor], Tensor], x: Tensor, r: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            y = layer(x)
        return F.relu(y) + x.sum()

    x = torch.randn(4, 8, requires_grad=True)
    found, _ = rewritten(Net(does, product), x, x, x, strict=True)
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(grad, torch.full_like(x, found.numel()))


@pytest.mark.parametrize(
    ("activation", "residual", "sites"), [("none", False, 1), ("relu", False, 0), ("none", True, 0)]
)
def test_a_layer_that_has_all_it_could_take_in_is_left_to_its_caller(activation, residual, sites):
    arrays = CSR.from_dense(torch.eye(6, 8))
    layout, pattern = Layout("csr", (1, 1), (6, 8)).written(), [arrays.pointers, arrays.indices]

    def model(x: Tensor, r: Tensor) -> Tensor:
        beside = r if residual else None
        return torch.ops.sparsecomp.sparse_linear.default(
            x, arrays.values, pattern, None, beside, layout, False, activation, ""
        )

    with torch.no_grad():
        assert len(told(model, linear.RULE, torch.ones(3, 8), torch.ones(3, 6))) == sites


ON_A_CARD: dict[str, tuple[Callable[..., Any], torch.dtype, dict[str, Any], bool]] = {
    "half": (lambda layer, x, r, b: F.relu(layer(x)), torch.float16, {}, True),
    "half, replayed": (lambda layer, x, r, b: F.relu(layer(x)), torch.float16, {"mode": "reduce-overhead"}, True),
    "float": (lambda layer, x, r, b: F.relu(layer(x)), torch.float32, {}, True),
    "float, replayed": (lambda layer, x, r, b: F.relu(layer(x)), torch.float32, {"mode": "reduce-overhead"}, False),
    "gelu": (lambda layer, x, r, b: F.gelu(layer(x)), torch.float16, {}, False),
    "no activation": (lambda layer, x, r, b: layer(x), torch.float16, {}, False),
    "residual": (lambda layer, x, r, b: F.relu(layer(x) + r), torch.float16, {}, False),
    "no bias": (lambda layer, x, r, b: F.relu(layer(x)), torch.float16, {"bias": False}, False),
    "trained": (lambda layer, x, r, b: F.relu(layer(x)), torch.float16, {"trained": True}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_A_CARD)
def test_where_a_dense_product_on_a_card_does_the_relu(name, monkeypatch):
    monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", DENSE))
    forward, dtype, options, joined = ON_A_CARD[name]
    options = dict(options)
    net = Net(forward, False, options.pop("bias", True)).to(dtype)
    inputs = [torch.ones(size, dtype=dtype) for size in ((2, 3, 8), (2, 3, 6), (6,))]
    target, graphs = Target(Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0"), H100), []
    with torch.set_grad_enabled(options.pop("trained", False)):
        assert told(net, linear.RULE, *inputs, target=target, into=graphs, **options) == ["dense"]
    assert ("dense_linear_relu" in graphs[0].code) == joined
