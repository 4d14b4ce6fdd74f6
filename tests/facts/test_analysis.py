"""Facts through graphs: named cases, writes through aliases, and random graphs run under the checker."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fact_checker import FactChecker, check, fact_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pace import limit, processor_seconds
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.errors import RuleError
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.facts.analysis import Analysis, analyse
from sparsecomp.passes.facts.registry import TRANSFERS, LostKind
from sparsecomp.reference import facts
from sparsecomp.snn import registry as neurons
from tests.fuzz.program import annotate


def trace(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """A symbolic trace with shapes."""
    gm = fx.symbolic_trace(function)
    ShapeProp(gm).propagate(*(x.clone() for x in inputs))
    return gm


def output_fact(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """The fact of what `function` returns, after a checked run."""
    gm = trace(function, *inputs)
    analysis = check(gm, *(x.clone() for x in inputs)).analysis
    output = next(node for node in gm.graph.nodes if node.op == "output")
    return analysis.fact(output.args[0], at=output)


X = torch.randn(4, 4, 8, 8)


def in_graph(function: Callable[..., Any], *args: Any) -> Any:
    """A call of `function` as Dynamo would put it in the graph; symbolic_trace cannot record it by itself."""
    tracer = next(arg.tracer for arg in args if isinstance(arg, fx.Proxy))
    return tracer.create_proxy("call_function", function, args, {})


def spikes(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).float()


@pytest.mark.parametrize(
    ("joined", "expected"),
    [((), (0, 1)), (("add",), (0, 3)), (("and",), (0, 2)), (("iand",), (0, 2)), (("by default",), (0, 3))],
)
def test_spikes_that_are_joined_with_a_residual(joined: tuple[str, ...], expected: tuple[int, int]) -> None:
    weight = torch.randn(4, 4, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], 1, 3, 1.0, 20.0, False, 4, None, 0.0, None, None, None, None)
    neuron = (0.0, "if", 1.0, None, False, 0.5, 0.0, True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        counts = (x > 0).to(torch.int8) + (x > 1).to(torch.int8)
        residual = (counts.unflatten(0, (4, 1)), *joined)[: 1 if joined == ("by default",) else 2] if joined else ()
        return torch.ops.sparsecomp.conv_lif.default(counts, weight, None, *how, *neuron, *residual)[0]

    fact = output_fact(layer, X)
    assert (fact.lo, fact.hi, fact.integral, fact.finite) == (*expected, True, True)


@pytest.mark.parametrize("named", [False, True])
def test_spikes_that_are_joined_with_anything_may_be_anything(named: bool) -> None:
    how = ([1, 1], [1, 1], [1, 1], 1, 3, 1.0, 20.0, False, 4, None, 0.0, None, None, None, None)
    neuron = (0.0, "if", 1.0, None, False, 0.5, 0.0, True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        counts, residual = (x > 0).to(torch.int8), x.to(torch.int8).unflatten(0, (4, 1))
        given: Any = ((), {"residual": residual}) if named else ((residual,), {})
        return torch.ops.sparsecomp.conv_lif.default(
            counts, torch.ones(4, 4, 3, 3), None, *how, *neuron, *given[0], **given[1]
        )[0]

    assert output_fact(layer, X) is None


KEEPS_BINARY = {
    "max_pool": lambda s: F.max_pool2d(s, 3, 2, 1),
    "nearest": lambda s: F.interpolate(s, scale_factor=2),
    "pad": lambda s: F.pad(s, (1, 1, 1, 1)),
    "view chain": lambda s: s.flatten(1).reshape(4, 4, -1).transpose(1, 2).permute(0, 2, 1).unsqueeze(0).squeeze(0),
    "chunk": lambda s: s.chunk(2, dim=1)[1],
    "unbind": lambda s: s.unbind(0)[2],
    "split": lambda s: torch.split(s, 2, dim=1)[0],
    "cat": lambda s: torch.cat([s, s], 1),
    "stack": lambda s: torch.stack([s, s * s]),
    "mask": lambda s: s * s.flip(0),
    "iand": lambda s: s * (1 - s.flip(0)),
    "inverse": lambda s: 1.0 - s,
    "half": lambda s: s.half(),
    "roll": lambda s: s.roll(1, 2).contiguous().clone().detach(),
    "dropout off": lambda s: F.dropout(s, 0.5, False),
    "clamped sum": lambda s: (s + s.flip(0)).clamp(max=1),
    "where": lambda s: torch.where(s > 0.5, s, 0.0),
    "masked_fill": lambda s: s.masked_fill(s.flip(0) > 0, 0.0),
    "logical": lambda s: torch.logical_or(s > 0, s.flip(0) > 0).float(),
}
LEAVES_BINARY = {
    "sum": lambda s: s + s,
    "difference": lambda s: s - s.flip(0),
    "negation": lambda s: -s,
    "average": lambda s: F.avg_pool2d(s, 2),
    "average of nine": lambda s: F.avg_pool2d(s, 3, 1, 1),
    "adaptive average": lambda s: F.adaptive_avg_pool2d(s, 1),
    "dropout on": lambda s: F.dropout(s, 0.5, True),
    "bilinear": lambda s: F.interpolate(s, scale_factor=2, mode="bilinear"),
    "scaled": lambda s: s * 0.5,
    "shifted": lambda s: s + 1,
    "padded with two": lambda s: F.pad(s, (1, 1), value=2.0),
    "dilated padded max": lambda s: F.max_pool2d(s, 2, 1, 1, dilation=3),
    "normalised": lambda s: F.layer_norm(s, (8,)),
}


@pytest.mark.parametrize("name", KEEPS_BINARY)
def test_keeps_binary(name: str) -> None:
    fact = output_fact(lambda x: KEEPS_BINARY[name](spikes(x)), X)
    assert fact is not None and fact.is_binary


@pytest.mark.parametrize("name", LEAVES_BINARY)
def test_does_not_stay_binary(name: str) -> None:
    fact = output_fact(lambda x: LEAVES_BINARY[name](spikes(x)), X)
    assert fact is None or not fact.is_binary


def test_residual_sums_count_up() -> None:
    fact = output_fact(lambda x: spikes(x) + spikes(x - 1) + spikes(x + 1), X)
    assert (fact.lo, fact.hi, fact.fits_int8) == (0, 3, True)


@pytest.mark.parametrize("p,hi,scale", [(0.5, 2, 1.0), (0.75, 4, 1.0), (0.2, 1, 1.25)])
def test_dropout_in_training_scales_the_spikes_it_keeps(p: float, hi: int, scale: float) -> None:
    fact = output_fact(lambda x: F.dropout(spikes(x), p, True), X)
    whole = scale == 1.0
    assert (fact.lo, fact.hi, fact.scale, fact.exact, fact.exact_zeros) == (0, hi, scale, whole, True)
    counts = output_fact(lambda x: F.dropout(spikes(x) + spikes(x - 1), p, True), X)
    assert counts.exact_zeros and (counts.integral, counts.hi) == (whole, 2 * hi if whole else None)


def test_a_rewritten_layer_is_no_alias_of_its_input() -> None:
    def residual(x: torch.Tensor, weight: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        spike = spikes(x)
        in_graph(torch.ops.sparsecomp.spike_linear.default, spike, weight, None, 3, "binary")
        counter.add_(1)
        return spike + spike

    fact = output_fact(residual, X, torch.ones(8, 8), torch.zeros(()))
    assert (fact.lo, fact.hi, fact.fits_int8) == (0, 2, True)


def test_average_over_a_power_of_two_is_a_scaled_count() -> None:
    fact = output_fact(lambda x: F.avg_pool2d(spikes(x), 2), X)
    assert fact.integral and fact.scale == 0.25 and (fact.lo, fact.hi) == (0, 4)
    nine = output_fact(lambda x: F.avg_pool2d(spikes(x), 3), X)
    assert not nine.integral and nine.exact_zeros and nine.non_negative


def test_attention_counts_coincidences() -> None:
    fact = output_fact(lambda x: spikes(x) @ spikes(x).transpose(-1, -2), X)
    assert (fact.lo, fact.hi) == (0, 8)


def test_reasons_name_what_ended_the_domain() -> None:
    gm = trace(lambda x: F.layer_norm(spikes(x), (8,)).flatten(1), X)
    last = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    reason = analyse(gm).why_not(last)
    assert reason is not None and reason.kind is LostKind.SHIFTS and "layer_norm ends the domain" in str(reason)


# ---- writes ---------------------------------------------------------------------------------------------------------


def test_a_write_through_a_view_ends_the_fact_for_later_readers_only() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = spikes(x)
        view = s.view(-1)
        before = torch.relu(s)
        view.add_(x.view(-1))
        return before, torch.neg(s)

    analysis = check(trace(model, X), X.clone()).analysis
    before, after = fact_at(analysis, "relu"), fact_at(analysis, "neg")
    assert before is not None and before.is_binary
    assert after is None or not after.integral


def test_a_fact_without_a_position_holds_at_every_position() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        s = spikes(x)
        kept = torch.relu(s)
        s.add_(x)
        return kept + s

    analysis = check(trace(model, X), X.clone()).analysis
    spike = next(node for node in analysis.graph.nodes if node.name.startswith("float"))
    assert analysis.fact(spike) is None


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda s, x: s.add_(x),
    "iadd": lambda s, x: in_graph(operator.iadd, s, x),
    "copy_": lambda s, x: s.copy_(x),
    "setitem": lambda s, x: in_graph(operator.setitem, s, 0, x[0]),
    "out=": lambda s, x: torch.add(x, x, out=s),
    "index_put_": lambda s, x: s.index_put_((torch.tensor([0]),), x[:1]),
    "normal_": lambda s, x: s.normal_(),
    "foreach": lambda s, x: torch._foreach_add_([s], [x]),
    "inplace=True": lambda s, x: F.silu(s, True),
    "through a slice": lambda s, x: s[1:3].mul_(x[1:3]),
    "through detach": lambda s, x: s.detach().add_(x),
    "through a chunk": lambda s, x: s.chunk(2)[0].add_(x[:2]),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_kind_of_write_is_seen(name: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        s = spikes(x)
        WRITES[name](s, x)
        return torch.neg(s)

    fact = fact_at(check(trace(model, X), X.clone()).analysis, "neg")
    assert fact is None or not fact.is_binary


def _updates_statistics(call: Callable[..., Any]) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """`call(x, mean, var)` with a running mean that begins as bits: (y, mean)."""

    def model(x: torch.Tensor, var: torch.Tensor) -> tuple[Any, torch.Tensor]:
        mean = (var > 2).float()
        return call(x, mean, var), torch.neg(mean)

    return model


def _table(call: Callable[..., Any]) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    def model(rows: torch.Tensor, table: torch.Tensor) -> tuple[Any, torch.Tensor]:
        bits = (table > 0).float()
        return call(rows, bits), torch.neg(bits)

    return model


ROWS = torch.tensor([[0, 1], [2, 3]])
UNANNOTATED_WRITES = {
    "batch_norm": (_updates_statistics(lambda x, m, v: F.batch_norm(x, m, v, None, None, True)), X, torch.ones(4)),
    "torch.batch_norm": (
        _updates_statistics(lambda x, m, v: torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, False)),
        X,
        torch.ones(4),
    ),
    "native_batch_norm": (
        _updates_statistics(lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)),
        X,
        torch.ones(4),
    ),
    "instance_norm": (_updates_statistics(lambda x, m, v: F.instance_norm(x, m, v)), X, torch.ones(4)),
    "embedding": (_table(lambda r, t: F.embedding(r, t, max_norm=0.5)), ROWS, torch.ones(4, 4)),
    "embedding by place": (_table(lambda r, t: F.embedding(r, t, None, 0.5)), ROWS, torch.ones(4, 4)),
    "embedding_bag": (_table(lambda r, t: F.embedding_bag(r, t, max_norm=0.5)), ROWS, torch.ones(4, 4)),
}


@pytest.mark.parametrize("name", UNANNOTATED_WRITES)
def test_writes_that_no_schema_tells_are_seen(name: str) -> None:
    model, *inputs = UNANNOTATED_WRITES[name]
    fact = fact_at(check(trace(model, *inputs), *(x.clone() for x in inputs)).analysis, "neg")
    assert fact is None or not fact.is_binary


def test_a_neuron_that_writes_its_input_ends_the_fact_of_it() -> None:
    class Bits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.add_(0.3) > 0.5).float()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = Bits()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            s = spikes(x)
            return self.neuron(s), torch.neg(s)

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Bits)

    neurons.register_neuron(Bits, domain=facts.binary(), writes_input=True)
    model = Model()
    analysis = check(fx.GraphModule(model, Tracer().trace(model)), X.clone()).analysis
    assert fact_at(analysis, "neg") is None
    fired = analysis.fact(next(node for node in analysis.graph.nodes if node.op == "call_module"))
    assert fired is not None and fired.is_binary


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 2.0])
def test_what_no_longer_names_its_factor_is_not_finite(factor: float) -> None:
    def model(x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        return torch.neg(torch.round(torch.clamp(spikes(x) * f, 0, 1)))

    gm = trace(model, X, torch.tensor(factor))
    fact = fact_at(check(gm, X.clone(), torch.tensor(factor)).analysis, "neg")
    assert fact is None or not fact.finite


def test_a_multiple_of_the_factor_that_is_written_is_no_grid() -> None:
    def model(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        factor.mul_(-1)
        return torch.neg(spikes(x) * factor), torch.neg(factor)

    analysis = check(trace(model, X, torch.tensor([2.0])), X.clone(), torch.tensor([2.0])).analysis
    fact = fact_at(analysis, "neg", which=1)
    assert fact is None or not fact.integral


def test_items_made_before_their_factor_was_written_are_no_multiples_of_it() -> None:
    def model(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(spikes(x) * factor, 2)
        factor.mul_(3)
        return torch.neg(parts[0])

    analysis = check(trace(model, X, torch.tensor(0.7)), X.clone(), torch.tensor(0.7)).analysis
    fact = fact_at(analysis, "neg")
    assert fact is None or not fact.integral


@pytest.mark.parametrize("unknown", ["to", "mul"])
def test_a_conversion_between_unknown_dtypes_may_be_no_copy(unknown: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        s = spikes(x) * 1
        kept = s.to(torch.float32)
        s.add_(0.3)
        return torch.neg(kept)

    gm = trace(model, X)
    for node in gm.graph.nodes:
        if node.name == unknown:
            node.meta.clear()
    fact = fact_at(check(gm, X.clone()).analysis, "neg")
    assert fact is None or not fact.integral


@pytest.mark.parametrize(
    "reshape",
    [
        lambda s: s.unsqueeze_(0),
        lambda s: s.data.contiguous().transpose_(0, 1),
        lambda s: s.resolve_conj().transpose_(0, 1),  # the tensor itself, by an operator that is not known
    ],
)
def test_a_shape_that_changes_in_place_is_no_ones(reshape: Callable[[torch.Tensor], Any]) -> None:
    """The example of `s` has the last of its shapes, whoever reads it."""

    def model(x: torch.Tensor) -> torch.Tensor:
        s = spikes(x)
        total = torch.sum(s, 0)
        reshape(s)
        return torch.neg(total)

    gm = fx.symbolic_trace(model)
    annotate(gm, [torch.ones(4, 2)])
    fact = fact_at(check(gm, torch.ones(4, 2)).analysis, "neg")
    assert fact is None or fact.hi is None or fact.hi >= 4


def test_verify_accepts_shapes_that_change_in_place() -> None:
    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mean = torch.sum(x, 0)
        mean.unsqueeze_(0)
        return F.linear(spikes(x), weight) + torch.neg(mean).sum()

    inputs = [torch.randn(4, 3), torch.randn(2, 3)]
    gm = fx.symbolic_trace(model)
    annotate(gm, inputs)
    expected = model(*inputs)
    report = pipeline.run_rules(gm, Options(implementation="binary", verify=True, strict=True))
    assert [site.rewritten for site in report.sites] == [True]
    torch.testing.assert_close(gm(*inputs), expected)


@pytest.mark.fails_inside
def test_a_transfer_function_that_fails_costs_one_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(op: Any, facts: Any) -> Any:
        raise OverflowError("too large")

    monkeypatch.setitem(TRANSFERS, "neg", broken)
    gm = trace(lambda x: (torch.neg(spikes(x)), torch.relu(spikes(x))), X)
    analysis = analyse(gm)
    failed = next(node for node in gm.graph.nodes if node.name == "neg")
    reason, other = analysis.why_not(failed), next(node for node in gm.graph.nodes if node.name == "relu")
    assert reason is not None and reason.kind is LostKind.FAILED and "OverflowError: too large" in str(reason)
    fact = analysis.fact(other)
    assert fact is not None and fact.is_binary
    report = pipeline.run_rules(gm, Options())
    assert any("too large" in note for note in report.notes)
    with pytest.raises(RuleError, match="neg.*too large"):
        pipeline.run_rules(gm, Options(strict=True))


def test_zero_in_place_and_relu_in_place_give_facts() -> None:
    assert output_fact(lambda x: torch.clone(x).zero_(), X).is_zero
    assert output_fact(lambda x: torch.clone(x).relu_(), X).non_negative


def test_steps_written_into_zeros_are_spikes() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in range(4):
            in_graph(operator.setitem, out, t, spikes(x[t]))
        return out.flatten(0, 1)

    assert output_fact(model, X).is_binary


@pytest.mark.parametrize("steps,binary", [(4, True), (3, False)])
def test_steps_written_into_empty_need_all_rows(steps: int, binary: bool) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for t in range(steps):
            in_graph(operator.setitem, out, t, spikes(x[t]))
        return out.flatten(0, 1)

    analysis = analyse(trace(model, X))
    fact = fact_at(analysis, "flatten")
    assert (fact is not None and fact.is_binary) == binary


def _set(out: Any, index: Any, value: Any) -> None:
    in_graph(operator.setitem, out, index, value)


EMPTY: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, int] | None]] = {
    # what is written into an empty tensor of four rows, from spikes s and anything x; the bounds of all of it after
    "every row": (lambda out, s, x: [_set(out, t, s[t]) for t in range(4)], (0, 1)),
    "rows from the end": (lambda out, s, x: [_set(out, -t, s[0]) for t in range(1, 5)], (0, 1)),
    "a row from both ends": (lambda out, s, x: [_set(out, t, s[0]) for t in (0, 1, 2, -2)], None),
    "a row twice": (lambda out, s, x: [_set(out, t, s[0]) for t in (0, 1, 2, 0)], None),
    "different rows": (lambda out, s, x: [_set(out, t, s[0] + t) for t in range(4)], (0, 4)),
    "a row of numbers": (lambda out, s, x: [_set(out, t, s[0] if t else 7) for t in range(4)], (0, 7)),
    "more into a row": (lambda out, s, x: [_set(out, t % 4, s[0] + t // 4 * 5) for t in range(5)], (0, 6)),
    "anything into a row": (lambda out, s, x: [_set(out, t % 4, s[0] if t < 4 else x[0]) for t in range(5)], None),
    "anything first": (lambda out, s, x: [_set(out, t % 4, s[0] if t else x[0]) for t in range(5)], None),
    "slices": (lambda out, s, x: [_set(out, slice(t, t + 1), s[:1]) for t in range(4)], None),
    "by truth": (lambda out, s, x: _set(out, x > 9, 1.0), None),
    "filled between": (lambda out, s, x: [_set(out, 0, s[0]), out.fill_(1), _set(out, 1, s[0])], (0, 1)),
    "scaled between": (lambda out, s, x: [_set(out, t, s[0]) if t < 4 else out.mul_(x) for t in (0, 4, 1, 2, 3)], None),
    "through a view": (lambda out, s, x: [_set(out.flatten(1), t, s[t].flatten()) for t in range(4)], None),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_tensor_holds_what_every_row_was_written_with(name: str) -> None:
    write, bounds = EMPTY[name]

    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        write(out, spikes(x), x)
        return torch.neg(out)

    analysis = analyse(trace(model, X))
    fact = fact_at(analysis, "neg")
    assert bounds == (None if fact is None else (fact.lo, fact.hi))
    if bounds is not None:
        check(trace(model, X), X.clone())


def _wrap(*args: Any) -> None:
    """Stands for the operator that calls a sub-graph."""


_wrap.__module__, _wrap.__name__ = "torch.ops.higher_order", "wrap"

BODIES: dict[str, tuple[Callable[..., Any], str, str]] = {
    # what the body makes of spikes a and a number f; what is known then of its first result, and of the spikes
    "passes on": (lambda a, f: (a * 1,), "{0, 1}", "{0, 1}"),
    "counts": (lambda a, f: (a + a, a), "integers 0..2", "{0, 1}"),
    "writes": (lambda a, f: (a.add_(f),), "", ""),
    "writes a copy": (lambda a, f: (a.clone().add_(f),), "", "{0, 1}"),
    "writes zero": (lambda a, f: (a.zero_() + 1,), "integers 1..1", ""),
    "scales": (lambda a, f: (a * f,), "{0, 1} x factor", "{0, 1}"),
    "scales by its own": (lambda a, f: (a * (f + 1),), "values -inf..inf, NaN possible", "{0, 1}"),
    "forgets": (lambda a, f: (torch.sin(a) + f,), "", "{0, 1}"),
    "gives its input": (lambda a, f: (a,), "{0, 1}", "{0, 1}"),
    "writes the factor": (lambda a, f: (a * 1, f.mul_(2)), "{0, 1}", "{0, 1}"),
}


def _around(body: Callable[..., Any], then: Callable[[Any, Any], Any]) -> tuple[Analysis, fx.Node, fx.Node]:
    """The analysis of spikes given to a sub-graph, its first result, and a node that reads the spikes later."""
    inner = fx.symbolic_trace(body)
    for node in inner.graph.nodes:
        node.meta["example_value"] = torch.zeros(()) if node.name in ("f", "add") else torch.zeros(3)
    root = nn.Module()
    root.body = inner
    graph = fx.Graph()
    x, factor = graph.placeholder("x"), graph.placeholder("factor")
    factor.meta["example_value"] = torch.zeros(())
    s = graph.call_method("float", (graph.call_function(torch.gt, (x, 0)),))
    scaled = graph.call_function(torch.mul, (s, factor))
    result = graph.call_function(_wrap, (graph.get_attr("body"), s, factor))
    first = graph.call_function(operator.getitem, (result, 0))
    then(graph, first)
    last = graph.call_function(torch.neg, (s,))
    graph.output((first, last, scaled))
    return analyse(fx.GraphModule(root, graph)), first, last


@pytest.mark.parametrize("name", BODIES)
def test_a_sub_graph_says_what_it_gives_and_what_it_writes(name: str) -> None:
    body, given, left = BODIES[name]
    analysis, first, last = _around(body, lambda graph, first: None)
    fact, spikes_later = analysis.fact(first), analysis.fact(last.args[0], at=last)
    assert (fact.described().rpartition(" from ")[0] if fact else "") == given
    assert (spikes_later.described().rpartition(" from ")[0] if spikes_later else "") == left
    if not given:
        assert analysis.why_not(first) is not None
    output = next(node for node in analysis.graph.nodes if node.op == "output")
    scaled = analysis.fact(output.args[0][2], at=output)
    assert (scaled is not None and scaled.scale == "factor") == (name != "writes the factor")


@pytest.mark.parametrize("name", ["gives its input", "passes on"])
def test_a_write_to_what_a_sub_graph_gave_reaches_what_it_was_given(name: str) -> None:
    """Where it may be the same memory."""
    body = BODIES[name][0]
    analysis, _, last = _around(body, lambda graph, first: graph.call_method("sin_", (first,)))
    fact = analysis.fact(last.args[0], at=last)
    assert fact is not None and fact.is_binary == (name == "passes on")


def test_an_analog_step_written_into_zeros_ends_the_fact() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        in_graph(operator.setitem, out, 0, spikes(x[0]))
        in_graph(operator.setitem, out, 1, x[1])
        return torch.neg(out)

    assert fact_at(check(trace(model, X), X.clone()).analysis, "neg") is None


def test_straight_through_of_an_unbounded_soft_value_keeps_zeros_and_their_source() -> None:
    gm = fx.symbolic_trace(lambda x: ((x > 0).float() - x.detach() + x) * 1.0)
    fact = fact_at(analyse(gm), "mul")
    assert fact is not None and not fact.integral and fact.exact_zeros and not fact.finite and fact.source == "gt"


def test_straight_through_of_a_hard_value_overwritten_since() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        hard, soft = spikes(x), torch.sigmoid(x)
        outer = hard - soft
        hard.zero_()
        return torch.neg(outer + soft)

    fact = fact_at(check(trace(model, X), X.clone()).analysis, "neg")
    assert fact is None or not fact.is_zero


STRAIGHT: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    # of a hard value h and a soft one s: the hard value exactly, up to the last places, or neither
    "h + (s - s)": (lambda h, s: h + (s - s.detach()), "exact"),
    "(s - s) + h": (lambda h, s: (s - s.detach()) + h, "exact"),
    "(h - s) + s": (lambda h, s: (h - s).detach() + s, "nearly"),
    "s + (h - s)": (lambda h, s: s + (h - s).detach(), "nearly"),
    "(h + s) - s": (lambda h, s: (h + s) - s, "nearly"),
    "(s + h) - s": (lambda h, s: (s + h).detach() - s, "nearly"),
    "s - (h + s)": (lambda h, s: s - (h + s).detach(), ""),
    "(s - h) + s": (lambda h, s: (s - h).detach() + s, ""),
    "(h + s) + s": (lambda h, s: (h + s) + s, ""),
    "(h - s) - s": (lambda h, s: (h - s) - s, ""),
    "(h - 2 s) + s": (lambda h, s: torch.sub(h, s, alpha=2) + s, ""),
    "(h - t) + s": (lambda h, s: (h - torch.sigmoid(s)) + s, ""),
    "(h - s) in place + s": (lambda h, s: h.clone().sub_(s) + s, ""),
}


@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.parametrize("soft", [torch.sigmoid, torch.tanh], ids=["sigmoid", "tanh"])
def test_straight_through_estimators_in_every_order(name: str, soft: Callable[..., Any]) -> None:
    call, expected = STRAIGHT[name]
    fact = output_fact(lambda x: call(spikes(x), soft(x)), X)
    binary = fact is not None and fact.is_binary_if_finite
    nearly = fact is not None and fact.is_nearly_binary and not binary
    assert (binary, nearly) == (expected == "exact", expected == "nearly")


class Opaque(nn.Module):
    """A leaf that writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(0.3)


def test_an_opaque_module_may_write_to_its_input() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Opaque()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            s = spikes(x)
            self.leaf(s)
            return torch.neg(s)

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Opaque)

    model = Model()
    gm = fx.GraphModule(model, Tracer().trace(model))
    assert fact_at(check(gm, X.clone()).analysis, "neg") is None


def test_a_layer_with_a_hook_is_opaque() -> None:
    pool = nn.MaxPool2d(2)
    pool.register_forward_hook(lambda module, args, out: out + 0.5)
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), pool))
    last = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    assert analyse(gm).fact(last) is None


def chain(length: int) -> fx.GraphModule:
    """Spikes, views and residual sums, all accumulated in place into one tensor."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(torch.zeros_like, (x,))
    for _ in range(length // 5):
        spike = graph.call_method("float", (graph.call_function(operator.gt, (x, 0)),))
        view = graph.call_method("view", (spike, -1))
        graph.call_function(operator.add, (view, view))
        graph.call_method("add_", (total, spike))
    graph.output(total)
    return fx.GraphModule(nn.Module(), graph)


def test_linear_in_the_size_of_the_graph() -> None:
    large = chain(10_000)
    assert min(processor_seconds(lambda: analyse(large)) for _ in range(2)) < limit(1.0)


# ---- random graphs --------------------------------------------------------------------------------------------------

Op = Callable[[list[torch.Tensor], int, int], Any]
OPS: dict[str, Op] = {
    "gt": lambda v, i, j: (v[i] > 0.1).to(v[i].dtype),
    "heaviside": lambda v, i, j: torch.heaviside(v[i], torch.tensor(1.0)),
    "add": lambda v, i, j: v[i] + v[j],
    "sub": lambda v, i, j: v[i] - v[j],
    "mul": lambda v, i, j: v[i] * v[j],
    "one minus": lambda v, i, j: 1 - v[i],
    "scale": lambda v, i, j: v[i] * 0.3,
    "halve": lambda v, i, j: v[i] / 2,
    "thirds": lambda v, i, j: v[i] / 3,
    "divide": lambda v, i, j: v[i] / v[j],
    "trunc": lambda v, i, j: torch.div(v[i], v[j], rounding_mode="trunc"),
    "neg": lambda v, i, j: -v[i],
    "abs": lambda v, i, j: v[i].abs(),
    "sign": lambda v, i, j: torch.sign(v[i]),
    "round": lambda v, i, j: torch.round(v[i]),
    "relu": lambda v, i, j: torch.relu(v[i]),
    "clamp": lambda v, i, j: v[i].clamp(-1, 2),
    "clamp half": lambda v, i, j: v[i].clamp(0, 0.5),
    "half": lambda v, i, j: v[i].half().float(),
    "int": lambda v, i, j: v[i].nan_to_num().clamp(-100, 100).to(torch.int32).float(),
    "where": lambda v, i, j: torch.where(v[i] > 0, v[j], v[i]),
    "maximum": lambda v, i, j: torch.maximum(v[i], v[j]),
    "max pool": lambda v, i, j: F.max_pool2d(v[i], 3, 1, 1),
    "avg pool": lambda v, i, j: F.avg_pool2d(v[i], 3, 1, 1),
    "avg pool 2": lambda v, i, j: F.interpolate(F.avg_pool2d(v[i], 2), scale_factor=2),
    "mean": lambda v, i, j: v[i].mean(-1, keepdim=True).expand(2, 2, 4, 4),
    "sum": lambda v, i, j: v[i].sum(-1, keepdim=True).expand(2, 2, 4, 4).clone(),
    "matmul": lambda v, i, j: v[i] @ v[j],
    "dropout": lambda v, i, j: F.dropout(v[i], 0.5, True),
    "straight": lambda v, i, j: ((v[i] > 0).float() - torch.sigmoid(v[i])).detach() + torch.sigmoid(v[i]),
    "straight wide": lambda v, i, j: ((v[i] > 0).float() - v[j]).detach() + v[j],
    "straight exact": lambda v, i, j: (v[i] > 0).float() + (v[j] - v[j].detach()),
    "cat": lambda v, i, j: torch.cat([v[i][:1], v[j][1:]]),
    "flip": lambda v, i, j: v[i].flip(0).permute(1, 0, 3, 2),
    "pad": lambda v, i, j: F.pad(v[i], (1, 1, 1, 1))[:, :, 1:5, 1:5],
    "view": lambda v, i, j: v[i].transpose(0, 1),
    "slice": lambda v, i, j: v[i][:, :, :4],
    "detach": lambda v, i, j: v[i].detach(),
    "in-place add": lambda v, i, j: v[i].add_(v[j]),
    "in-place mul": lambda v, i, j: v[i].mul_(v[j]),
    "in-place relu": lambda v, i, j: v[i].relu_(),
    "in-place zero": lambda v, i, j: v[i].zero_(),
    "in-place copy": lambda v, i, j: v[i].copy_(v[j]),
    "setitem": lambda v, i, j: (in_graph(operator.setitem, v[i], 0, v[j][0]), v[i])[1],
    "slice write": lambda v, i, j: (v[i][:, 0].copy_(v[j][:, 1]), v[i])[1],
    "masked fill": lambda v, i, j: v[i].masked_fill_(v[j] > 0, 0.0),
    "clone": lambda v, i, j: v[i].clone(),
}
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=14
)


def random_model(steps: list[tuple[str, int, int]]) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        values = [torch.clone(x), (y > 0).float(), torch.zeros_like(x)]
        for name, i, j in steps:
            values.append(OPS[name](values, i % len(values), j % len(values)))
        return values

    return model


@pytest.mark.slow(reason="many graphs")
@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS, st.integers(0, 10**6), st.sampled_from(["plain", "small integers", "nan", "inf"]), st.booleans())
def test_random_graphs_obey_their_facts(steps: list[tuple[str, int, int]], seed: int, kind: str, shapes: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2, 2, 4, 4, generator=generator) * 2 for _ in range(2))
    if kind == "small integers":
        x = x.round()
    if kind in ("nan", "inf"):
        x[0, 0, 0, :2] = float(kind)
    gm = fx.symbolic_trace(random_model(steps))
    if shapes:
        try:
            ShapeProp(gm).propagate(x.clone(), y.clone())
        except RuntimeError:
            return  # a write into an expanded tensor or between overlapping parts: eager refuses it, too
    try:
        gm(x.clone(), y.clone())
    except RuntimeError:
        return
    check(gm, x.clone(), y.clone())


def test_the_checker_finds_a_false_claim() -> None:
    gm = trace(lambda x: torch.neg(spikes(x) + spikes(x)), X)
    truth = analyse(gm)
    lie = {node: [(p, _half(v)) for p, v in h] for node, h in truth.histories.items()}
    with pytest.raises(AssertionError):
        FactChecker(gm, Analysis(gm.graph, lie, {}, truth.order)).run(X)


def _half(value: Any) -> Any:
    return value.__class__(0, 1, True) if getattr(value, "hi", None) == 2 else value


@pytest.mark.parametrize("after", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("before", [None, torch.float32, torch.float16])
def test_a_conversion_is_a_copy_only_where_both_dtypes_are_known_and_differ(before, after) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    source = graph.call_method("clone", (x,))
    cast = graph.call_method("to", (source, torch.float16))
    graph.call_method("add_", (cast, 1))
    graph.output(source)
    for node, dtype in ((source, before), (cast, after)):
        if dtype is not None:
            node.meta["example_value"] = torch.zeros(2, dtype=dtype)
    found = analyse(fx.GraphModule(torch.nn.Module(), graph))
    assert found.unchanged(source, source) == (None not in (before, after) and before is not after)
