"""spikes → conv2d / linear: which sites are rewritten, which are not and why; results are eager's.

Weights are small multiples of 1/16, so every sum is exact and equality is demanded to the bit; a float64 run of the
same model is the other oracle.
"""

import copy
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from rewriting import AttributeLIF, ConvNet, OnSpikes, Surrogate, SurrogateLIF, dyadic, rewritten, site, spikes
from torch import fx, nn

import sparsecomp
from sparsecomp.errors import RuleError
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.engine.rule import Refusal, Rule
from sparsecomp.passes.graph.canonicalize import op_of
from sparsecomp.passes.spiking import spike_conv
from sparsecomp.reference.digits import join_weight, split_weight
from sparsecomp.reference.geometry import Window

pytestmark = pytest.mark.quick_cases(2)


def _signal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _same(module: nn.Module, x: torch.Tensor, rule: str = "spike_conv", **options):
    """The module is rewritten and gives eager's bits and layout."""
    with torch.no_grad():
        expected = module(x)
        found, report = rewritten(module, x, **options)
    assert site(report, rule).rewritten, site(report, rule).reason
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.stride() == expected.stride()
    return site(report, rule)


def _refused(module: nn.Module, x: torch.Tensor, rule: str = "spike_conv", **options) -> str:
    with torch.no_grad():
        expected = module(x)
        found, report = rewritten(module, x, **options)
    assert not site(report, rule).rewritten
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return site(report, rule).reason


GEOMETRIES = [
    {}, {"stride": 2}, {"padding": (2, 1)}, {"dilation": 2, "padding": 2}, {"groups": 4}, {"bias": False},
    {"padding": "same"}, {"padding": "valid"}, {"stride": (1, 3), "padding": 1},
]  # fmt: skip


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("size", [(7, 7), (13, 9)], ids=str)
def test_conv2d_equals_eager_to_the_bit(geometry, size):
    layer = dyadic(nn.Conv2d(16, 12, 3, **geometry))
    _same(OnSpikes(layer), _signal(2, 16, *size))


@pytest.mark.parametrize(
    "geometry",
    [{}, {"stride": 2}, {"padding": 2, "dilation": 2}, {"groups": 4}, {"bias": False}, {"padding": "same"}],
    ids=str,
)
def test_conv1d_equals_eager_to_the_bit(geometry):
    _same(OnSpikes(dyadic(nn.Conv1d(16, 12, 3, **geometry))), _signal(2, 16, 11))


@pytest.mark.parametrize(
    "geometry", [{}, {"stride": (2, 1, 1)}, {"padding": (1, 0, 2)}, {"dilation": 2}, {"groups": 4}], ids=str
)
def test_conv3d_equals_eager_to_the_bit(geometry):
    _same(OnSpikes(dyadic(nn.Conv3d(16, 12, (2, 3, 1), **geometry))), _signal(2, 16, 5, 6, 4))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("geometry", [{}, {"stride": 2, "padding": 1}, {"groups": 4, "padding": "same"}], ids=str)
def test_a_map_without_a_batch_dimension(dims, geometry):
    """As eager, in bits, layout and gradients."""
    layer = dyadic(getattr(nn, f"Conv{dims}d")(16, 12, 3, **geometry))
    _same(OnSpikes(layer), _signal(16, *(7, 5, 6)[:dims]))
    other = copy.deepcopy(layer)
    expected = OnSpikes(layer)(_signal(16, *(7, 5, 6)[:dims])).square().sum()
    found, report = rewritten(lambda x: OnSpikes(other)(x).square().sum(), _signal(16, *(7, 5, 6)[:dims]))
    assert site(report, "spike_conv").rewritten
    for loss in (expected, found):
        loss.backward()
    for one, right in zip(other.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(one.grad, right.grad)


def test_reflected_spikes_are_spikes():
    _same(OnSpikes(dyadic(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"))), _signal(1, 4, 6, 6))


@pytest.mark.parametrize("channels", [3, 16, 17, 48])
def test_any_number_of_channels(channels):
    _same(OnSpikes(dyadic(nn.Conv2d(channels, 5, 1))), _signal(2, channels, 1, 1))


@pytest.mark.parametrize("shape", [(4, 16), (2, 5, 16), (16,)], ids=str)
def test_linear_equals_eager_to_the_bit(shape):
    _same(OnSpikes(dyadic(nn.Linear(16, 6))), _signal(*shape), "spike_linear")


@pytest.mark.parametrize("fill", [-1.0, 1.0])
def test_no_spike_and_every_spike(fill):
    _same(OnSpikes(dyadic(nn.Conv2d(8, 8, 3, padding=1))), torch.full((1, 8, 5, 5), fill))


def test_one_spike_in_a_corner():
    x = torch.full((1, 8, 5, 5), -1.0)
    x[0, 3, 4, 4] = 1
    _same(OnSpikes(dyadic(nn.Conv2d(8, 8, 3, padding=1))), x)


def test_channels_last_stays_channels_last():
    module = OnSpikes(dyadic(nn.Conv2d(16, 16, 3, padding=1)).to(memory_format=torch.channels_last))
    _same(module, _signal(2, 16, 8, 8).to(memory_format=torch.channels_last))


def test_nan_and_infinity_before_the_threshold_are_eagers():
    x = _signal(1, 8, 5, 5)
    x[0, 0, 0, 0], x[0, 1, 1, 1], x[0, 2, 2, 2] = torch.nan, torch.inf, -torch.inf
    _same(OnSpikes(dyadic(nn.Conv2d(8, 8, 3))), x)


SHAPES = {
    "half": lambda s: s * 0.5,
    "quarter of counts": lambda s: (s + s) * 0.25,
    "counts": lambda s: s + s + s,
    "signed": lambda s: s - spikes(-s + 0.5),
    "pooled": lambda s: F.max_pool2d(s, 2),
    "three": lambda s: s * 3.0,
    "third": lambda s: s * (1 / 3),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_other_domains_and_scales(shape):
    module = OnSpikes(nn.Conv2d(16, 12, 3, padding=1), shape)
    x = _signal(2, 16, 8, 8)
    with torch.no_grad():
        found, report = rewritten(module, x)
        expected = copy.deepcopy(module).double()(x.double())
    assert site(report, "spike_conv").rewritten, site(report, "spike_conv").reason
    scale = expected.abs().max()
    assert (found.double() - expected).abs().max() / scale < 1e-6


def test_a_learnt_factor_moves_to_the_weight_and_keeps_its_gradient():
    class Graded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.conv = nn.Parameter(torch.tensor(0.3)), nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(Surrogate.apply(x) * self.factor)

    model = Graded()
    other = copy.deepcopy(model)
    x = _signal(2, 8, 6, 6).requires_grad_()
    y = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    found, report = rewritten(other, y)
    found.square().sum().backward()
    assert x.grad.any() and model.factor.grad
    for a, b in zip((x, *model.parameters()), (y, *other.parameters()), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)
    assert site(report, "spike_conv").rewritten, site(report, "spike_conv").reason


def test_gradients_equal_eagers():
    model = dyadic(ConvNet(SurrogateLIF))
    other = copy.deepcopy(model)
    x = _signal(2, 3, 8, 8)
    model(x).square().sum().backward()
    found, report = rewritten(other, x)
    found.square().sum().backward()
    assert site(report, "spike_conv").rewritten
    assert all(p.grad.any() for p in model.parameters())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6)


def test_two_forwards_and_one_backward():
    model = dyadic(nn.Sequential(OnSpikes(nn.Conv2d(4, 4, 3))))
    other = copy.deepcopy(model)
    x = _signal(1, 4, 6, 6)
    (model(x) + model(2 * x)).sum().backward()
    found, _ = rewritten(lambda value: other(value) + other(2 * value), x)
    found.sum().backward()
    torch.testing.assert_close(other[0].layer.weight.grad, model[0].layer.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype):
    found = _same(OnSpikes(dyadic(nn.Conv2d(16, 8, 3))).to(dtype), _signal(2, 16, 6, 6).to(dtype))
    assert found.precision == "half"


def test_autocast_gives_eagers_dtype():
    module, x = OnSpikes(dyadic(nn.Conv2d(16, 8, 3))), _signal(2, 16, 6, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
        found, report = rewritten(module, x)
    assert site(report, "spike_conv").rewritten, site(report, "spike_conv").reason
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _with_weight(value: float) -> nn.Module:
    layer = dyadic(nn.Conv2d(16, 8, 3))
    with torch.no_grad():
        layer.weight[0, 0, 0, 0] = value
    return layer


@pytest.mark.parametrize(
    ("module", "x", "reason"),
    [
        (nn.Conv2d(4, 4, 3), _signal(1, 4, 6, 6), "not proved to be spikes"),
        (OnSpikes(nn.Conv2d(4, 4, 3)).double(), _signal(1, 4, 6, 6).double(), "torch.float64"),
        (OnSpikes(nn.Conv2d(4, 4, 2, padding="same")), _signal(1, 4, 6, 6), "'same' is not symmetric"),
        (OnSpikes(_with_weight(torch.inf)), _signal(1, 16, 6, 6), "NaN or infinite"),
        (OnSpikes(_with_weight(torch.nan)), _signal(1, 16, 6, 6), "NaN or infinite"),
        (OnSpikes(nn.Conv2d(4, 4, 3), lambda s: (s + s) * 0.3), _signal(1, 4, 6, 6), ""),
        (OnSpikes(nn.Conv2d(4, 4, 3), lambda s: s + 0.1), _signal(1, 4, 6, 6), ""),
    ],
    ids=["analog", "float64", "same-even", "inf", "nan", "0.3 counts", "shifted"],
)  # fmt: skip
def test_what_is_left_dense_says_why(module, x, reason):
    message = _refused(module, x)
    assert reason in message and message


def test_a_rewrite_that_does_not_pay_is_not_made():
    reason = _refused(OnSpikes(nn.Conv2d(16, 16, 3)), _signal(1, 16, 6, 6), implementation="auto")
    assert "no CUDA device" in reason
    assert "dense" in _refused(OnSpikes(nn.Conv2d(16, 16, 3)), _signal(1, 16, 6, 6), implementation="dense")


@pytest.mark.parametrize(("precision", "digits"), [("exact", 3), ("tf32", 2), ("auto", 3)])
def test_precision_sets_the_weight_digits(precision, digits):
    """One more where the weights are trained: they grow apart."""
    for trained in (False, True):
        with torch.set_grad_enabled(trained):
            _, report = rewritten(OnSpikes(nn.Conv2d(16, 8, 3)), _signal(1, 16, 6, 6), precision=precision)
        assert f"{digits + trained}, 'binary'," in report.graph_after


@pytest.mark.parametrize("outlier", [1.0, 10.0, 100.0, 1e3, 1e4, 1e6, 1e20, 1e38])
@pytest.mark.parametrize(("precision", "bound"), [("exact", 1e-6), ("tf32", 3e-4)])
def test_an_outlier_that_never_fires_costs_no_precision(outlier, precision, bound):
    """Weights in as many bytes as the compiler says, against float64; the one great weight meets no spike."""
    layer = nn.Conv2d(16, 32, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(_signal(32, 16, 3, 3))
        layer.weight[:, 0, 0, 0] = outlier
    x = _signal(4, 16, 8, 8)
    x[:, 0] = -1
    _, report = rewritten(OnSpikes(layer), x, precision=precision)
    found = site(report, "spike_conv")
    if not found.rewritten:
        assert outlier > 1e3 and "differ so much" in found.reason
        return
    digits = next(count for count in (2, 3, 4) if f"{count}, 'binary'," in report.graph_after)
    weight = join_weight(*split_weight(layer.weight.detach(), digits), (3, 3), 16)
    expected = F.conv2d(spikes(x).double(), layer.weight.double())
    assert (F.conv2d(spikes(x).double(), weight) - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize("channels", [64, 512])
def test_ordinary_weights_need_no_further_digit(channels):
    """Normal and uniform weights, pruned or not, and channels of zeros."""
    for weight in (_signal(64, channels, 3, 3), torch.rand(64, channels, 3, 3) - 0.5):
        layer = nn.Conv2d(channels, 64, 3)
        pruned = weight * (torch.rand(weight.shape) < 0.1)
        pruned[3] = 0
        for value in (weight, pruned):
            layer.weight.data = value
            with torch.no_grad():
                _, report = rewritten(OnSpikes(layer), _signal(1, channels, 4, 4))
            assert "3, 'binary'," in report.graph_after


def test_a_disabled_rule_does_not_run():
    _, report = rewritten(OnSpikes(nn.Conv2d(4, 4, 3)), _signal(1, 4, 6, 6), disable=["spike_conv"])
    assert not [found for found in report.sites if found.rule == "spike_conv"]


def _broken(stage: str) -> Rule:
    def consider(node, ctx):
        verdict = spike_conv.consider(node, ctx)
        if not verdict:
            return verdict
        if stage == "consider":
            raise ValueError("broken on purpose")

        def build():
            node.graph.call_function(torch.relu, (node.args[0],))
            raise ValueError("broken on purpose")

        object.__setattr__(verdict, "build", build)
        return verdict

    return Rule("spike_conv", consider)


@pytest.mark.fails_inside
@pytest.mark.parametrize("stage", ["consider", "build"])
def test_a_rule_that_fails_leaves_the_graph_as_it_was(stage):
    gm, before = _traced()
    report = pipeline.run_rules(gm, Options(implementation="binary"), rules=[_broken(stage)])
    assert gm.code == before
    assert "broken on purpose" in report.sites[-1].reason
    assert not report.rewritten
    gm, _ = _traced()
    with pytest.raises(RuleError, match="broken on purpose"):
        pipeline.run_rules(gm, Options(implementation="binary", strict=True), rules=[_broken(stage)])


def _traced():
    graphs = []
    torch._dynamo.reset()
    torch.compile(OnSpikes(nn.Conv2d(4, 4, 3)), backend=lambda gm, _: graphs.append(gm) or gm)(_signal(1, 4, 6, 6))
    return graphs[0], graphs[0].code


@pytest.mark.slow(reason="traces 1000 layers")
def test_passes_are_linear_in_the_size_of_the_graph():
    class Deep(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            for _ in range(self.layers):
                x = F.conv2d((x > 0).to(x.dtype), weight) * 0.5 + 0.25
            return x

    def calls(layers: int) -> int:
        graphs, made = [], 0
        torch._dynamo.reset()
        inputs = (_signal(1, 2, 2, 2), _signal(2, 2, 1, 1))
        torch.compile(Deep(layers), backend=lambda gm, _: graphs.append(gm) or gm)(*inputs)

        def count(_frame, event: str, _argument) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            report = pipeline.run_rules(graphs[0], Options())
        finally:
            sys.setprofile(None)
        assert sum(site.rule == "spike_conv" for site in report.sites) == layers
        assert len(graphs[0].graph.nodes) > 5 * layers
        return made

    calls(20)
    # counted, since seconds on a busy machine vary more than twofold; 16 times as many if they were quadratic
    assert calls(1000) < 1.1 * 4 * calls(250)


def test_reset_and_changing_batches_give_eagers_results():
    eager, model = dyadic(ConvNet()).eval(), dyadic(ConvNet()).eval()
    with torch.no_grad():
        for batch in (2, 2, 1, 3):
            for net in (eager, model):
                for module in net.modules():
                    if isinstance(module, AttributeLIF):
                        module.v = None
            x = 4 * _signal(batch, 3, 8, 8, seed=batch)
            for _ in range(2):
                expected = eager(x)
                found, _ = rewritten(model, x)
                torch.testing.assert_close(found, expected, rtol=0, atol=0)


SITES = {
    # a layer, the shape of its input, and how it is described: n c, size, k, window, groups, size of the output
    "conv2d": (
        nn.Conv2d(32, 48, (3, 5), stride=(1, 2), padding=(1, 0), dilation=(2, 1)), (2, 32, 9, 11),
        (2, 32, (9, 11), 48, Window((3, 5), (1, 2), (1, 0), (2, 1)), 1, (7, 4)),
    ),
    "groups": (
        nn.Conv2d(32, 64, 1, groups=2, stride=2), (3, 32, 4, 6),
        (3, 32, (4, 6), 64, Window((1, 1), (2, 2), (0, 0), (1, 1)), 2, (2, 3)),
    ),
    "conv1d": (
        nn.Conv1d(32, 16, 3, stride=2, padding=1), (5, 32, 8),
        (5, 32, (8,), 16, Window((3,), (2,), (1,), (1,)), 1, (4,)),
    ),
    "same": (
        nn.Conv2d(16, 32, (3, 5), padding="same"), (2, 16, 6, 7),
        (2, 16, (6, 7), 32, Window((3, 5), (1, 1), (1, 2), (1, 1)), 1, (6, 7)),
    ),
    "valid": (
        nn.Conv2d(16, 32, (3, 5), padding="valid"), (2, 16, 6, 7),
        (2, 16, (6, 7), 32, Window((3, 5), (1, 1), (0, 0), (1, 1)), 1, (4, 3)),
    ),
    "linear": (
        nn.Linear(32, 48), (2, 3, 32), (6, 32, (1, 1), 48, Window((1, 1), (1, 1), (0, 0), (1, 1)), 1, (1, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 3), (torch.float16, 2)])
def test_what_the_gate_is_told_of_a_site(name, dtype, digits, monkeypatch):
    layer, shape, expected = SITES[name]
    rule = "spike_linear" if name == "linear" else "spike_conv"
    module = importlib.import_module(f"sparsecomp.passes.spiking.{rule}")
    seen, choose = [], module.choose
    monkeypatch.setattr(module, "choose", lambda first, told, *rest: seen.append(told) or choose(first, told, *rest))
    with torch.no_grad():
        rewritten(OnSpikes(copy.deepcopy(layer).to(dtype)), _signal(*shape).to(dtype))
    (told,) = seen
    assert (told.n, told.c, told.size, told.k, told.window, told.groups, told.out_size) == expected
    assert (told.device, told.itemsize, told.digits, told.trained) == ("cpu", dtype.itemsize, digits, False)
    assert told.density is told.active is None
    # of a graph for Inductor on a CPU: bytes are written for float32 alone, and the host calls each kernel
    assert (told.fused, told.hosted) == (dtype is torch.float32, True)
    assert told.channels_last == (name == "linear")


@pytest.mark.parametrize("multi_step", [False, True])
def test_what_the_gate_is_told_of_a_site_op_by_op(multi_step, monkeypatch):
    """Time steps are more frames; a graph that runs op by op may train, but counts one product."""
    layer = pytest.importorskip("spikingjelly.activation_based.layer").Conv2d(16, 32, 3, padding=1)
    layer.step_mode = "m" if multi_step else "s"
    seen, choose = [], spike_conv.choose
    monkeypatch.setattr(spike_conv, "choose", lambda one, told, *rest: seen.append(told) or choose(one, told, *rest))
    model, x = OnSpikes(dyadic(layer)), _signal(*((3,) if multi_step else ()), 2, 16, 4, 5)
    if not multi_step:
        x = x.to(memory_format=torch.channels_last)
    optimized = sparsecomp.optimize(model.eval(), x, implementation="binary", strict=True)
    assert site(optimized.report, "spike_conv").rewritten
    (told,) = seen
    assert (told.n, told.c, told.size) == (6 if multi_step else 2, 16, (4, 5))
    assert (told.fused, told.hosted, told.trained, told.channels_last) == (False, True, False, not multi_step)
    assert torch.equal(optimized(x), model(x))


WINDOWS = [
    {}, {"stride": 2}, {"stride": (2,)}, {"padding": 1}, {"padding": (2,)}, {"dilation": 2, "padding": "same"},
    {"padding": "valid", "stride": 3}, {"padding": "same"}, {"padding": "same", "dilation": (3,)},
]  # fmt: skip
ODD_WINDOWS = [
    {"stride": (1, 3), "padding": (0, 2)}, {"padding": "same", "dilation": (1, 2)}, {"dilation": (2, 1), "stride": [2]},
]  # fmt: skip


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize(
    ("shape", "window"),
    [((5,), window) for window in WINDOWS] + [((3, 5), window) for window in WINDOWS + ODD_WINDOWS],
)
def test_a_window_in_numbers_is_the_window_as_written(shape, window):
    """However strides, paddings and dilations are spelled, and whatever is left out."""
    convolve = {1: F.conv1d, 2: F.conv2d}[len(shape)]
    x, weight = torch.randn(2, 3, *(11, 12)[: len(shape)]), torch.randn(4, 3, *shape)
    geometry = spike_conv.geometry_of(_call(convolve, weight, **window))
    assert all(len(numbers) == len(shape) for numbers in geometry)
    torch.testing.assert_close(convolve(x, weight, None, *geometry), convolve(x, weight, **window))


@pytest.mark.parametrize(("shape", "dilation"), [((2, 3), 1), ((3, 4), 1), ((3, 4), (2, 1)), ((4, 4), (1, 1))])
def test_what_pads_one_side_more_is_refused(shape, dilation):
    refused = spike_conv.geometry_of(_call(F.conv2d, torch.zeros(4, 3, *shape), padding="same", dilation=dilation))
    assert isinstance(refused, Refusal) and "'same' is not symmetric" in str(refused)


def test_a_padding_whose_weight_is_unknown_is_refused():
    assert isinstance(spike_conv.geometry_of(_call(F.conv2d, None, padding="same")), Refusal)
    assert spike_conv.geometry_of(_call(F.conv2d, None, padding="valid")) == ([1, 1], [0, 0], [1, 1])


def _call(function, weight, **arguments):
    graph = fx.Graph()
    x, given = graph.placeholder("x"), graph.placeholder("weight")
    if weight is not None:
        given.meta["example_value"] = weight
    return op_of(graph.call_function(function, (x, given), arguments))
