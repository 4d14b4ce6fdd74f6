"""The rule for sparse layers: what it fuses behind them, when they run dense, and what it leaves alone."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matrices import of_every_format
from rewriting import rewritten, site
from torch import Tensor, nn

import sparsecomp
from sparsecomp import formats
from sparsecomp.errors import FrozenWeightError
from sparsecomp.nn import SparseLinear
from sparsecomp.ops.sparse import dense_copy
from sparsecomp.passes.cost import sparse as sparse_cost
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.sparse import chain
from sparsecomp.reference.patterns import Layout


@pytest.fixture(autouse=True)
def small_products_stay_sparse(monkeypatch):
    """What is tested here has a few numbers, for which dense is faster; tests of that say so themselves."""
    decide = lambda product: Decision(f"spmm_{product.layout.format} (reference)", "sparse is faster")  # noqa: E731
    monkeypatch.setattr(chain, "decide", decide)


FORMATS: dict[str, dict[str, Any]] = of_every_format({
    "CSR": {"sparsity": 0.5}, "COO": {"sparsity": 0.5}, "CSC": {"sparsity": 0.5}, "NM": {"n": 2, "m": 4},
    "BSR": {"block": 2, "sparsity": 0.5}, "BCSC": {"block": 2, "sparsity": 0.5}, "NARROW": {"sparsity": 0.5},
    "BITMAP": {"sparsity": 0.5},
})  # fmt: skip
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """A sparse layer for a forward that a test gives."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], format: str = "CSR") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = SparseLinear.from_linear(nn.Linear(8, 6), getattr(formats, format), **FORMATS[format])
        self.does = forward

    def forward(self, x: Tensor) -> Any:
        return self.does(self.layer, x)

    def exactly(self, x: Tensor) -> Any:
        """The same in float64, by the dense weight."""
        weight, bias = self.layer.weight.detach().to_dense().double(), self.layer.bias.detach().double()
        return self.does(lambda x: F.linear(x, weight, bias), x.double())


FUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "alone": (lambda layer, x: layer(x), "bias;"),
    "relu": (lambda layer, x: F.relu(layer(x)), "bias, relu;"),
    "in place": (lambda layer, x: layer(x).relu_(), "bias, relu;"),
    "residual": (lambda layer, x: F.relu(x[..., :6] + layer(x)), "bias, residual, relu;"),
    "gelu": (lambda layer, x: F.gelu(layer(x), approximate="tanh"), "bias, gelu_tanh;"),
    "dropout, off": (lambda layer, x: x[..., :6] + F.dropout(layer(x), training=False), "bias, residual;"),
    "dropout, on": (lambda layer, x: F.relu(F.dropout(layer(x), 0.0, training=True)), "bias;"),
    "read twice": (lambda layer, x: (lambda y: F.relu(y) + y.sum())(layer(x)), "bias;"),
    "another activation": (lambda layer, x: F.softplus(layer(x)), "bias;"),
    "broadcast": (lambda layer, x: layer(x) + x[:1, :, :6], "bias;"),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("what", FUSED)
def test_what_follows_a_layer_is_fused_where_nobody_else_reads_it(what):
    forward, fused = FUSED[what]
    model = Net(forward)
    with torch.no_grad():
        out, report = rewritten(model, X, implementation="auto", strict=True)
    torch.testing.assert_close(out.double(), model.exactly(X), rtol=1e-5, atol=1e-6)
    found = site(report, "sparse_linear")
    assert found.rewritten and found.implementation == "csr" and f"fused with {fused}" in found.reason
    assert found.reason.startswith("CSR 6x8 at 50.0% sparsity by spmm_csr (reference)")
    assert len(report.rewritten) == 1


@pytest.mark.parametrize("write", ["before", "between", "behind"])
def test_a_write_to_an_input_matters_between_the_product_and_what_follows(write):
    """As of a cache of keys: any input may be the weight's memory."""

    class Step(Net):
        def __init__(self) -> None:
            super().__init__(lambda layer, x: x)
            self.register_buffer("cache", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            if write == "before":
                self.cache.add_(1)
            out = self.layer(x)
            if write == "between":
                self.cache.add_(1)
            out = torch.relu(out)
            if write == "behind":
                self.cache.add_(1)
            return out

    model = Step()
    with torch.no_grad():
        out, report = rewritten(model, X, implementation="auto", strict=True)
    torch.testing.assert_close(out, torch.relu(model.layer(X)))
    (found,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert found.rewritten == (write != "between")
    assert ("fused with" in found.reason) == found.rewritten


@pytest.mark.slow(reason="compiles with gradients")
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.slow_cases(5)
def test_every_format_compiled_with_gradients_sparse_and_dense(format, dense, monkeypatch):
    if dense:
        monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    model = Net(lambda layer, x: torch.relu(layer(x) + x[..., :6]), format)
    compiled = torch.compile(model, backend="sparsecomp", fullgraph=True)
    results = []
    for call in (compiled, model):
        x = X.clone().requires_grad_()
        out = call(x)
        out.square().sum().backward()
        results.append((out, x.grad, model.layer.values.grad, model.layer.bias.grad))
        model.zero_grad()
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)
    report = sparsecomp.last_report()
    kernel = {"COO": "csr", "CSC": "csr", "BCSC": "bsr"}.get(format, format.lower())
    assert site(report, "sparse_linear").implementation == ("dense" if dense else kernel)


@pytest.mark.slow(reason="Inductor compiles")
def test_a_layer_that_is_faster_dense_is_written_out_once_under_a_promise(monkeypatch):
    monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    for format in FORMATS:
        model = Net(lambda layer, x: F.relu(layer(x)), format)
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, backend="sparsecomp", fullgraph=True, options={"frozen": True})
            torch.testing.assert_close(compiled(X).double(), model.exactly(X), rtol=1e-5, atol=1e-6)
        report = sparsecomp.last_report()
        assert site(report, "sparse_linear").implementation == "dense copy"
        assert "stored_to_dense" not in report.graph_after
        with torch.no_grad():
            model.layer.values.data.mul_(2)  # a broken promise
            assert not torch.allclose(compiled(X).double(), model.exactly(X))
    # in training there is no such copy
    _, report = rewritten(model, X, implementation="auto", strict=True, frozen=True)
    assert site(report, "sparse_linear").implementation == "dense" and "stored_to_dense" in report.graph_after


@pytest.mark.parametrize(("tied", "implementation"), [(True, "dense"), (False, "compared copy")])
def test_layers_of_the_same_values_at_other_places_share_no_copy(tied, implementation, monkeypatch):
    """In a graph: it is one memory, and both may be written out before either is multiplied."""
    monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    monkeypatch.setattr(dense_copy, "DEVICES", ("cpu",))
    matrices = [formats.CSR.from_dense(torch.eye(8).roll(turn, 0)) for turn in (0, 3)]
    one, other = (SparseLinear(matrix, requires_grad=False) for matrix in matrices)
    other.values = one.values if tied else other.values
    compiled = torch.compile(lambda x: (one(x), other(x)), backend="sparsecomp")
    with torch.no_grad():
        for found, matrix in zip(compiled(X), matrices, strict=True):
            torch.testing.assert_close(found, X @ matrix.to_dense().mT)
    sites = [found for found in sparsecomp.last_report().sites if found.rule == "sparse_linear"]
    assert [found.implementation for found in sites] == [implementation] * 2


@pytest.mark.slow(reason="Inductor compiles")
def test_a_copy_that_is_kept_is_compared_in_each_call(monkeypatch):
    """As on a GPU; a CPU's operator writes the weight out."""
    monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    monkeypatch.setattr(dense_copy, "DEVICES", ("cpu",))
    model = Net(lambda layer, x: F.relu(layer(x)), "CSR")
    with torch.no_grad():
        compiled = torch.compile(model, backend="sparsecomp", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(X).double(), model.exactly(X), rtol=1e-5, atol=1e-6)
            model.layer.values.data.mul_(2)
    report = sparsecomp.last_report()
    assert site(report, "sparse_linear").implementation == "compared copy"
    assert "kept and compared with it in each call" in site(report, "sparse_linear").reason
    assert "dense_copy" in report.graph_after and "the weight compared with its copy in each call" in report.summary
    _, report = rewritten(model, X, implementation="auto", strict=True)  # in training there is no such copy
    assert site(report, "sparse_linear").implementation == "dense"


@pytest.mark.parametrize(
    ("size", "rows", "frozen", "trained", "dense"),
    [
        (8, 4, True, False, True), (8, 4, False, True, True), (256, 4, False, False, False),
        (256, 4, True, False, True), (1024, 4, True, False, False), (1024, 4, False, True, False),
    ],
)  # fmt: skip
def test_a_cpu_runs_the_faster_way(size, rows, frozen, trained, dense, monkeypatch):
    monkeypatch.setattr(chain, "decide", sparse_cost.decide)
    torch.manual_seed(0)
    layer, x = SparseLinear.from_linear(nn.Linear(size, size), sparsity=0.9), torch.randn(rows, size)
    with torch.set_grad_enabled(trained):
        out, report = rewritten(layer, x, implementation="auto", strict=True, frozen=frozen)
    found = site(report, "sparse_linear")
    assert found.implementation == ("dense copy" if dense and frozen else "dense" if dense else "csr")
    once = frozen and not trained
    rival = "us dense" if once else r"us written out, ([\d.]+) us as a plain dense layer"
    told = re.search(rf"estimated ([\d.]+) us against [\d.]+ {rival}", found.reason)
    assert told is not None
    if not once and not dense:  # the gain is over the plain dense layer
        assert found.expected_gain == pytest.approx(float(told[2]) / float(told[1]), rel=0.01)
    exactly = F.linear(x.double(), layer.weight.detach().to_dense().double(), layer.bias.double())
    torch.testing.assert_close(out.double(), exactly, rtol=1e-5, atol=1e-6)


def test_a_cpu_keeps_dtypes_it_has_no_estimate_of():
    problem = sparse_cost.Product.of(
        Layout("csr", (1, 1), (8, 8)), 32, False, [4, 8], True, torch.empty(4, 8, dtype=torch.float16), False, False,
        "none", trained=False,
    )  # fmt: skip
    decision = sparse_cost.decide(problem)
    assert not decision.dense and decision.gain is None and "no estimate of torch.float16 on cpu" in decision.reason


@pytest.mark.usefixtures("op_by_op")
def test_a_broken_promise_is_found_out_in_debugging(monkeypatch):
    monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    model = Net(lambda layer, x: F.relu(layer(x)))
    compiled = torch.compile(model, backend="sparsecomp", fullgraph=True, options={"frozen": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(X).double(), model.exactly(X), rtol=1e-5, atol=1e-6)
        model.layer.values.data.mul_(2)
        with pytest.raises(FrozenWeightError, match="values.* was promised to stay"):
            compiled(X)


@pytest.mark.parametrize("dense", [False, True])
def test_autocast_rounds_as_torch_does(dense, monkeypatch):
    if dense:
        monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    model = Net(lambda layer, x: F.relu(layer(x)))
    with torch.autocast("cpu", torch.bfloat16):
        out, report = rewritten(model, X, implementation="auto", strict=True)
    assert site(report, "sparse_linear").rewritten and out.dtype is torch.bfloat16
    wanted = model.exactly(X)
    assert (out - wanted).norm() <= 2**-7 * wanted.norm()
    out.sum().backward()
    assert model.layer.values.grad.dtype is torch.float32


@pytest.mark.usefixtures("op_by_op")
def test_a_graph_that_begins_autocast_is_verified_within_it():
    dense, x = nn.Linear(16, 16), torch.randn(4, 16)
    layer = SparseLinear.from_linear(nn.Linear(16, 16), sparsity=0.5)

    def model(x):
        with torch.autocast("cpu", torch.bfloat16):
            narrow = dense(F.relu(layer(x)))
        return layer(narrow.float()), narrow

    with torch.no_grad():
        found = torch.compile(model, backend="sparsecomp", options={"verify": True, "strict": True})(x)
        assert [one.dtype for one in found] == [torch.float32, torch.bfloat16]
        torch.testing.assert_close(found, model(x))
    assert sparsecomp.last_report().rewritten and not torch.is_autocast_enabled("cpu")


def test_an_operand_that_changes_meanwhile_is_read_before():
    def forward(layer: Any, x: Tensor) -> Tensor:
        x = x.clone()
        y = layer(x)
        x.mul_(2)
        return F.relu(y + x[..., :6])

    model = Net(forward)
    out, report = rewritten(model, X, implementation="auto", strict=True)
    torch.testing.assert_close(out, model(X))
    found = site(report, "sparse_linear")
    assert "written to before the result is complete" in found.reason and found.module == "layer"


def test_a_product_with_the_layers_own_weight_writes_to_nothing():
    model = Net(lambda layer, x: F.linear(F.relu(layer(x)), layer.weight.T))
    with torch.no_grad():
        out, report = rewritten(model, X, implementation="auto", strict=True)
        weight = model.layer.weight.to_dense()
        torch.testing.assert_close(out, F.relu(X @ weight.T + model.layer.bias) @ weight)
    assert "fused with bias, relu" in site(report, "sparse_linear").reason
    assert len(report.rewritten) == len(report.sites) == 2


def test_layers_stay_as_written_if_asked():
    model = Net(lambda layer, x: layer(x))
    _, report = rewritten(model, X, implementation="dense")
    assert "implementation='dense'" in site(report, "sparse_linear").reason
    _, report = rewritten(Net(lambda layer, x: F.relu(layer(x))), X, implementation="dense")
    assert site(report, "sparse_linear").module == "layer"
    _, report = rewritten(model, X, implementation="auto", disable=("sparse_linear",))
    assert not [found for found in report.sites if found.rule == "sparse_linear"]


@pytest.mark.usefixtures("op_by_op")
def test_other_batch_sizes_need_no_other_graph():
    model = Net(lambda layer, x: F.relu(layer(x) + x[..., :6]))
    compiled = torch.compile(model, backend="sparsecomp", fullgraph=True, dynamic=True)
    for rows in (2, 5, 7):
        x = torch.randn(rows, 3, 8)
        torch.testing.assert_close(compiled(x), model(x))


# -- inputs that are not finite


RULES = {"layer": "sparse_linear", "tensor": "sparse_matmul"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("form", RULES)
def test_precision_exact_keeps_what_is_not_finite_to_the_rows_that_store_it(form, value, monkeypatch):
    dense = lambda product: Decision("dense", "dense is faster")  # noqa: E731
    monkeypatch.setattr(chain, "decide", dense)
    weight = torch.eye(6, 8)
    layer = SparseLinear.from_linear(nn.Linear(8, 6), mask=weight)
    x = torch.zeros(2, 8)
    x[0, 3] = value
    function = layer if form == "layer" else lambda x: F.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        found, report = rewritten(function, x, implementation="auto", precision="exact", strict=True)
        # feature 3 is stored for row 3 alone
        assert (~found.isfinite()).nonzero().tolist() == [[0, 3]]
        assert "precision='exact' keeps it sparse" in site(report, RULES[form]).reason
        found, report = rewritten(function, x, implementation="auto", strict=True)
        assert (~found.isfinite()).nonzero().tolist() == [[0, row] for row in range(6)]
        assert "for finite inputs" in site(report, RULES[form]).reason


def test_the_report_names_the_layer_and_not_what_is_fused_behind_it():
    layer = SparseLinear.from_linear(nn.Linear(256, 512), sparsity=0.9)
    report = sparsecomp.explain(nn.Sequential(nn.Identity(), layer, nn.ReLU()), torch.randn(32, 256))
    (found,) = (one for one in report.sites if one.rule == "sparse_linear")
    assert found.module == "1" and "relu" in found.reason
    assert {node.module for node in report.after if node.rule == "sparse_linear"} == {"1"}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("device", "mode", "named"),
    [("h100", "default", True), ("h100", "reduce-overhead", False), (None, "default", False)],
)
def test_a_kernel_is_named_where_a_card_waits_for_the_host(device, mode, named):
    report = sparsecomp.explain(Net(lambda layer, x: layer(x)), X, device=device, mode=mode)
    assert "sparse_linear" in report.graph_after and ("'spmm_csr (reference)'" in report.graph_after) == named


def test_the_first_line_tells_of_weights_that_are_written_out_and_of_the_promise_against_it(monkeypatch):
    monkeypatch.setattr(chain, "decide", lambda product: Decision("dense", "dense is faster"))
    model = nn.Sequential(*(SparseLinear.from_linear(nn.Linear(8, 8), sparsity=0.5) for _ in range(2))).eval()
    with torch.no_grad():
        summary = sparsecomp.explain(model, torch.randn(4, 8)).summary
        told = "2 of 2 sites rewritten, 2 of them to run dense, the weight written out in each call (frozen=True"
        assert told in summary
        assert "written out" not in sparsecomp.explain(model, torch.randn(4, 8), frozen=True).summary
    trained = sparsecomp.explain(model.train(), torch.randn(4, 8)).summary
    assert "written out in each call" in trained and "frozen" not in trained  # training is no promise's


def test_without_triton_the_estimate_for_a_card_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(chain, "decide", sparse_cost.decide)
    monkeypatch.setattr("sparsecomp.passes.cost.sparse.has_triton", lambda: False)
    model = nn.Sequential(SparseLinear.from_linear(nn.Linear(256, 256), sparsity=0.9), nn.ReLU()).eval()
    with torch.no_grad():
        report = sparsecomp.explain(model, torch.randn(64, 256), device="h100")
    (site,) = report.sites
    assert (site.module, site.rewritten, site.expected_gain) == ("0", True, None)
    assert site.reason.endswith("Triton is not installed: pip install 'sparsecomp[gpu]'")
