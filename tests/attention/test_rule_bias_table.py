"""Tables that are trained and read at many places get a gradient of our own where that pays, and eager's numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_models import N
from kernel_devices import needs_triton
from test_rule_trained_biases import FARTHEST, Layers, given, near
from torch import Tensor, fx, nn

import sparsecomp
from sparsecomp.compiler.capture import Graph
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.nn import SparseEmbedding
from sparsecomp.options import Options
from sparsecomp.report import Report

pytestmark = needs_triton
ROWS = 2 * FARTHEST + 1


def trained(function: Callable[..., Any], *inputs: Any, card: str = "h100", **options: Any) -> tuple[Any, Report, str]:
    """What a function gives, with gradients, if its one graph is rewritten as for a card and runs on a CPU; the report;
    the graph's code."""
    parsed, found = Options.parse(None, {"strict": True, "verify": True, **options}), []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report = Graph.of_dynamo(gm, example_inputs, {}, parsed).rewrite(parsed, target_named(card))
        found.append((report, gm.code))
        return gm.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend)(*inputs)
    ((report, code),) = found
    return result, report, code


def reasons(report: Report) -> list[tuple[bool, str]]:
    return [(one.rewritten, one.reason) for one in report.sites if one.rule == "bias_table"]


class Reading(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], index: Tensor, rows: int, *features: int) -> None:
        super().__init__()
        self.read = read
        self.table = nn.Parameter(torch.randn(rows, *features, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return (self.read(self.table, self.index) * x).square().sum()


def padded(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table, -2)


SPELLINGS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "indexed": (lambda t, i: t[i], (3,)), "of numbers": (lambda t, i: t[i], ()),
    "all features": (lambda t, i: t[i, :], (3,)), "in a row": (lambda t, i: t[i.view(-1), ...].view(N, N, 3), (3,)),
    "from the end": (lambda t, i: t[i - ROWS], (3,)), "embedding": (lambda t, i: F.embedding(i.int(), t), (3,)),
    "padded": (padded, (3,)), "last row padded": (lambda t, i: F.embedding(i, t, -1), (3,)),
    "by its schema": (lambda t, i: torch.embedding(t, i), (3,)),
    "padded by its schema": (lambda t, i: torch.embedding(t, i, 2), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.quick_cases(6)
def test_spellings_get_the_gradients_of_eager(name: str) -> None:
    read, features = SPELLINGS[name]
    model, x = Reading(read, near(), ROWS, *features), torch.randn(N, N, *features)
    found, report, code = trained(model, x)
    ((rewritten, reason),) = reasons(report)
    busiest = int(torch.bincount(near().flatten()).max())
    assert rewritten and f"{ROWS} rows are read at {N * N} places, one of them at {busiest};" in reason
    assert "torch.ops.sparsecomp.table_rows.default(" in code
    (by,) = torch.autograd.grad(found, model.table)
    exact = Reading(read, near(), ROWS, *features).double()
    (right,) = torch.autograd.grad(exact(x.double()), exact.table)
    assert float((by.double() - right).norm() / right.norm()) < 1e-5


def test_gradients_of_gradients() -> None:
    model, exact = Reading(padded, near(), ROWS, 2), Reading(padded, near(), ROWS, 2).double()
    x = torch.ones(N, N, 2)
    results = []
    for loss, table in ((trained(model, x)[0], model.table), (exact(x.double()), exact.table)):
        (by,) = torch.autograd.grad(loss, table, create_graph=True)
        results.append((by.double(), torch.autograd.grad(by.square().sum(), table)[0].double()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_attention_of_two_layers_with_a_shared_bias() -> None:
    """The rule of attention looks at how the bias was made, and comes first."""
    model, operands = Layers(), given()
    found, report, code = trained(model, *operands, implementation="skip")
    assert [one.rewritten for one in report.sites if one.rule == "block_attention"] == [True, True]
    assert all("100% of its blocks" in one.reason for one in report.sites if one.rule == "block_attention")
    ((rewritten, reason),) = reasons(report)
    assert rewritten and "without atomics" in reason
    assert code.count("torch.ops.sparsecomp.table_rows.default(") == 1
    wanted = [*operands, *model.parameters()]
    exact, exact_model = [one.detach().double().requires_grad_() for one in operands], Layers().double()
    exact_model.load_state_dict(model.state_dict())
    right = exact_model(*exact)
    by = torch.autograd.grad(found.square().sum(), wanted)
    right_by = torch.autograd.grad(right.square().sum(), [*exact, *exact_model.parameters()])
    for one, other in zip((found, *by), (right, *right_by), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 1e-5


def test_words_stay() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20_000, 512, _weight=torch.zeros(20_000, 512))

        def forward(self, words: Tensor) -> Tensor:
            return self.embedding(words).sum()

    report = sparsecomp.explain(Words(), torch.zeros(8, 512, dtype=torch.int64), device="h100")
    ((rewritten, reason),) = reasons(report)
    assert not rewritten and "20000 rows are read at 4096 places" in reason and "dense" in reason


def test_what_an_index_holds_counts_only_where_it_stays() -> None:
    """An input is another in each call: its example, all of one row, says nothing."""
    table, index = torch.zeros(64, 64, requires_grad=True), torch.zeros(4096, dtype=torch.int64)
    _, report, _ = trained(lambda table, index: table[index].sum(), table, index)
    ((rewritten, reason),) = reasons(report)
    assert not rewritten and "one of them at 64;" in reason
    _, report, _ = trained(Reading(lambda t, i: t[i], index, 64, 64), torch.zeros(()))
    ((rewritten, reason),) = reasons(report)
    assert rewritten and "one of them at 4096;" in reason


@pytest.mark.parametrize("read", [
    lambda t, i: t[i > FARTHEST] if len(t) == N else t[:, i], lambda t, i: t.detach()[i], lambda t, i: t[i, None],
])  # fmt: skip
def test_what_is_no_table_is_no_site(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    table = torch.zeros(ROWS, ROWS, requires_grad=True)
    _, report, _ = trained(lambda table: read(table, near()).sum() + table.sum(), table)
    assert not reasons(report)


def test_a_sparse_table_is_no_site() -> None:
    """Nor is any other tensor that is no plain one."""
    layer = SparseEmbedding.from_embedding(nn.Embedding(ROWS, 16), sparsity=0.5)
    _, report, _ = trained(lambda x: (F.embedding(near(), layer.weight) * x).sum(), torch.ones(()))
    assert not reasons(report)


def test_options_of_an_embedding_stay() -> None:
    model = Reading(lambda t, i: F.embedding(i, t, scale_grad_by_freq=True), near(), ROWS, 3)
    _, report, _ = trained(model, torch.ones(N, N, 3))
    assert reasons(report) == [
        (False, "the gradient by the table stays torch's: it has max_norm, scale_grad_by_freq or sparse")
    ]
    doubles = Reading(lambda t, i: t[i], near(), ROWS, 3).double()
    ((rewritten, reason),) = reasons(trained(doubles, torch.ones(N, N, 3))[1])
    assert not rewritten and "float64" in reason


def test_inference_and_a_cpu_have_nothing_to_gain() -> None:
    model, x = Reading(lambda t, i: t[i], near(), ROWS, 3), torch.ones(N, N, 3)
    with torch.no_grad():
        assert not reasons(trained(model, x)[1])
    assert not reasons(sparsecomp.explain(model, x))


@pytest.mark.slow(reason="compiles a model")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_whole_compiler(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, where Inductor gets the rows as it would, and the gradient as a call."""
    monkeypatch.setattr("sparsecomp.passes.engine.rule.Context.device", lambda self, device: torch.device("cuda"))
    monkeypatch.setattr("sparsecomp.passes.cost.bias_table.target_of", lambda device: target_named("h100"))
    model, operands = Layers(), given()
    disable = {"disable": ("block_attention",)}
    compiled = torch.compile(model, backend="sparsecomp", options=disable)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            found, right = compiled(*operands), model(*operands)
        grads = [torch.autograd.grad(one.float().square().sum(), model.table.weight)[0] for one in (found, right)]
        assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < (5e-2 if autocast else 1e-4)
        with torch.no_grad():
            model.table.weight.mul_(0.5)
    report = sparsecomp.last_report(compiled)
    assert report is not None and [one for one, _ in reasons(report)] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(mode: str, dtype: torch.dtype) -> None:
    """A table alone, whose gradient arrives with heads outermost."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(65, 6))

        def forward(self, x: Tensor) -> Tensor:
            place = torch.arange(x.shape[1], device=x.device)
            bias = F.embedding((place[:, None] - place).clamp(-32, 32) + 32, self.table)
            return (x * bias.permute(2, 0, 1)).square()

    model, x = Biased().cuda().to(dtype), torch.randn(6, 500, 500, device="cuda").to(dtype)
    compiled = torch.compile(model, backend="sparsecomp", options={"mode": mode})
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        (by,) = torch.autograd.grad(compiled(x).float().sum(), model.table)
        exact = Biased().cuda().double()
        exact.load_state_dict(model.state_dict())
        (right,) = torch.autograd.grad(exact(x.double()).sum(), exact.table)
        assert float((by.double() - right).norm() / right.norm()) < (1e-5 if dtype is torch.float32 else 2e-2)
        with torch.no_grad():
            model.table.mul_(0.7)
    report = sparsecomp.last_report(compiled)
    assert report is not None and [one for one, _ in reasons(report)] == [True]
