"""What a layer's input may be for the spike rules: factors, state that is written to, transforms, empty layers."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Examples, OnSpikes, Surrogate, dyadic, rewritten, site, spikes
from snn_zoo import compiler
from torch import fx, nn

import sparsecomp
from sparsecomp._compat import FakeTensorMode
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.spiking import spike_conv, spike_conv_transpose, spike_linear
from sparsecomp.passes.spiking.operand import cast
from sparsecomp.reference import facts
from sparsecomp.report import Report

pytestmark = pytest.mark.quick_cases(2)


def signal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compiled(function, *inputs, **options):
    """Through the decompositions, on bytes and split weights; with the report of the one graph."""
    reports = []
    torch._dynamo.reset()
    return torch.compile(function, backend=compiler(reports, "aot", **options))(*inputs), reports[-1]


FACTORS = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), -2.5, 1e-42, 70000.0]


@pytest.mark.parametrize("value", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", [(), (1,)])
def test_a_factor_known_only_by_its_name(value, dtype, form):
    """In float64, on what eager hands to the layer; gradients of all three by eager's own rules."""
    x, w, b = signal(5, 16).to(dtype), signal(8, 16, seed=2).to(dtype), signal(8, seed=3).to(dtype)
    f = torch.full(form, value).to(dtype)

    def model(x, f, w, b):
        return F.linear(spikes(x) * f, w, b)

    given = (spikes(x) * f).double()
    expected = F.linear(given, w.double(), b.double())
    with torch.no_grad():
        found, report = compiled(model, x, f, w, b)
    assert site(report, "spike_linear").rewritten
    limit = 65504 if dtype is torch.float16 else 3e38
    expected = torch.where(expected.abs() > limit, expected.sign() * torch.inf, expected)
    bound = {"rtol": 2e-6, "atol": 3e-6} if dtype is torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    bound["atol"] *= 1 + (abs(value) if given.isfinite().all() else 0)
    torch.testing.assert_close(found.double(), expected, equal_nan=True, **bound)


@pytest.mark.parametrize("value", [0.0, 0.7, -1e-30, float("nan"), float("inf")])
@pytest.mark.parametrize("how", ["rewritten", "aot"])
def test_gradients_beside_a_factor(value, how):
    """Of input, factor and weight, against eager in float64."""

    class Graded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.layer = nn.Parameter(torch.tensor(value)), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(Surrogate.apply(x) * self.factor)

    model, x = Graded(), signal(6, 8).requires_grad_()
    exact, twin = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    out, report = rewritten(model, x) if how == "rewritten" else compiled(model, x)
    assert site(report, "spike_linear").rewritten
    out.sum().backward()
    exact(twin).sum().backward()
    mine = [x, *model.parameters()]
    for a, b in zip(mine, [twin, *exact.parameters()], strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("scale", [70000.0, 1e-50, 1e39, 1 / 3, -0.3, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_number_beyond_the_range_of_the_dtype(scale, dtype):
    x, w = signal(5, 16).to(dtype), signal(8, 16, seed=2).to(dtype)
    with torch.no_grad():
        found, report = compiled(lambda x, w: F.linear(spikes(x) * scale, w), x, w)
    given = spikes(x) * scale
    largest = abs(torch.tensor(scale, dtype=torch.float64).to(dtype))
    # a number that the dtype does not hold as a normal one says nothing of what the products are
    ordinary = bool(largest.isfinite()) and float(largest) >= torch.finfo(dtype).smallest_normal
    assert site(report, "spike_linear").rewritten == ordinary
    expected = F.linear(given.double(), w.double()).to(dtype).double()
    size = given.double().abs().max().nan_to_num(0, 0, 0).item()
    rtol, step = (1e-5, 1e-45) if dtype is torch.float32 else (2e-3, 6e-8)
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol * size + step, equal_nan=True)


def test_pooled_half_spikes_with_small_weights_are_as_exact_as_eagers():
    x, w = signal(4, 512, 8, 8), (signal(64, 512, seed=2) * 1e-4).half()
    with torch.no_grad():
        found, report = compiled(lambda x, w: F.linear(F.avg_pool2d(spikes(x).half(), 8).flatten(1), w), x, w)
    assert site(report, "spike_linear").rewritten
    expected = F.linear(F.avg_pool2d(spikes(x.double()), 8).flatten(1), w.double())
    assert (found.double() - expected).abs().max() / expected.abs().max() < 2.0**-11


def test_a_factor_that_is_written_to_stays_where_it_was():
    def model(x, f, w):
        f.mul_(-1)
        return F.linear(-(spikes(x) * f), w)

    x, w = signal(3, 4), signal(8, 4, seed=2)
    with torch.no_grad():
        found, report = compiled(model, x, torch.tensor([2.0]), w)
    assert not site(report, "spike_linear").rewritten
    torch.testing.assert_close(found, F.linear(2 * spikes(x), w))


def test_claims_about_scaled_spikes_end_where_the_factor_may_be_nan():
    scaled = facts.multiply_by_node(facts.binary("s"), "f")
    assert scaled.finite and scaled.integral
    for left in (scaled.values_only(), facts.zeros_kept(scaled, finite=True), facts.join((scaled, facts.constant(1)))):
        assert left is not None and not left.finite
    f, x, w = torch.tensor(float("nan")), signal(3, 4), signal(8, 4, seed=2)
    with torch.no_grad():
        found, _ = compiled(lambda x, f, w: F.linear((spikes(x) * f).clamp(0, 1).round(), w), x, f, w)
    assert found.isnan().all()


class Recurrent(nn.Module):
    """Spikes in a buffer that the forward pass writes."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view = view
        self.register_buffer("fired", torch.zeros(3, 4, dtype=torch.bool))
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.fired.float(), self.weight) + x
        (self.fired.view(12).view(3, 4) if self.view else self.fired).copy_(y > 0.5)
        return y


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("backend", ["inductor", "aot"])
def test_a_backward_sees_the_spikes_that_were_read(view, backend):
    """The weight's gradient by hand: the output's twice itself, times the spikes of before."""
    model, x = Recurrent(view), signal(3, 4)
    model.fired[1] = True
    before = model.fired.clone().float()
    options = {"implementation": "binary"}
    call = torch.compile(model, backend="sparsecomp", options=options) if backend == "inductor" else None
    y = call(x) if call is not None else compiled(model, x)[0]
    y.square().sum().backward()
    torch.testing.assert_close(y.detach(), before @ torch.ones(4, 4) + x)
    torch.testing.assert_close(model.weight.grad, (2 * y.detach()).t() @ before)


def test_state_that_is_written_keeps_its_layers_rewritten():
    class Behind(Recurrent):
        def __init__(self) -> None:
            super().__init__(False)
            self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(Surrogate.apply(self.norm(super().forward(x))))

    _, report = compiled(Behind(), signal(3, 4))
    assert site(report, "spike_linear", 0).rewritten and site(report, "spike_linear", 1).rewritten


def test_batch_norm_in_training_keeps_its_spikes_rewritten():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    layer = nn.Linear(8, 4)
    _, report = compiled(lambda x: layer(Surrogate.apply(model(x) - 0.5)), signal(6, 4))
    assert site(report, "spike_linear").rewritten


def told(
    model: Callable[..., Any], *inputs: torch.Tensor, eager: bool = False, **options: Any
) -> tuple[list[str], fx.GraphModule]:
    """What the rules on spikes say of each site of a graph, "" where it is rewritten, and the graph, which gives
    eager's results."""
    gm = fx.symbolic_trace(model)
    Examples(gm).run(*inputs)
    expected = model(*inputs)
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    parsed = Options.parse(None, {"implementation": "binary", "strict": True, **options})
    rules = [spike_conv.RULE, spike_conv_transpose.RULE, spike_linear.RULE]
    report = pipeline.run_rules(gm, parsed, values=values, eager=eager, rules=rules)
    torch.testing.assert_close(gm(*inputs), expected, equal_nan=True)
    return ["" if site.rewritten else site.reason for site in report.sites], gm


def _factor_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    factor = w.amax()
    out = F.linear(spikes(x) * factor, w)
    factor.mul_(2)
    return out


def _reshaped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.linear(spikes(x), w)
    y.unsqueeze_(0)
    return y


JUDGED: dict[str, tuple[Callable[..., Any], str | None]] = {
    # of x (3, 4) and w (5, 4): "" where it is rewritten, None where there is no site
    "spikes": (lambda x, w: F.linear(spikes(x), w), ""),
    "twice spikes": (lambda x, w: F.linear(spikes(x) * 2, w), ""),
    "a third": (lambda x, w: F.linear(spikes(x) * (1 / 3), w), ""),
    "less a third": (
        lambda x, w: F.linear(-(spikes(x) * (1 / 3)), w),
        "spikes times 0.3333333333333333, which is not a power of two",
    ),
    "counts of thirds": (lambda x, w: F.linear((spikes(x) + spikes(x - 1)) * (1 / 3), w), "not small integers: values"),
    "computed factor": (lambda x, w: F.linear(spikes(x) * w.sum(), w), ""),
    "counts of halves": (lambda x, w: F.linear((spikes(x) + spikes(x - 1)) * 0.5, w), ""),
    "positive": (lambda x, w: F.linear(x.relu(), w), "the input is sparse, but not small integers: values 0..inf"),
    "shifted": (
        lambda x, w: F.linear(spikes(x) + 0.1, w),
        "values 0..2 from gt; add of values on different grids ends the domain",
    ),
    "a computed factor": (lambda x, w: F.linear(spikes(x) * w.amax(), w), ""),
    "a computed factor that is written to": (_factor_written, "the factor amax of the spikes is written to in place"),
    "rounded": (lambda x, w: F.linear(x.round(), w), "not small integers: integers -inf..inf"),
    "analog": (lambda x, w: F.linear(x, w), "not proved to be spikes: `x` is an input of the graph"),
    "a vector": (lambda x, w: F.linear(spikes(x), w[0]), "linear with a vector for a weight on spikes"),
    "reshaped in place": (_reshaped, "the shape of the input or the weight is unknown"),
    "product": (lambda x, w: spikes(x) @ w.t(), "matmul on spikes is not supported"),
    "product from the right": (lambda x, w: w @ spikes(x).t(), "matmul on spikes is not supported"),
    "analog product": (lambda x, w: x @ w.t(), None),
    "sum of products": (lambda x, w: torch.addmm(w[:, 0], spikes(x), w.t()), "addmm on spikes is not supported"),
    "no product": (lambda x, w: spikes(x).sum() * w, None),
    "transposed": (lambda x, w: F.conv_transpose1d(spikes(x)[..., None], w[:4, :, None]), ""),
    "analog transposed": (lambda x, w: F.conv_transpose1d(x[..., None], w[:4, :, None]), "not proved to be spikes"),
}  # fmt: skip


@pytest.mark.quick_cases(len(JUDGED))
@pytest.mark.parametrize("name", JUDGED)
def test_which_layers_are_taken(name):
    model, reason = JUDGED[name]
    with torch.no_grad():
        found, _ = told(model, signal(3, 4), signal(5, 4, seed=2))
    assert len(found) == (reason is not None)
    assert reason is None or ((found[0] == "") if reason == "" else (reason in found[0]))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_factor_on_another_device_stays_where_it_is(device):
    with FakeTensorMode():
        x, w = torch.empty(3, 4, device="cuda"), torch.empty(5, 4, device="cuda")
        factor = torch.empty((), device=device)
    gm = fx.symbolic_trace(lambda x, w, factor: F.linear(spikes(x) * factor, w))
    Examples(gm).run(x, w, factor)
    layer = next(node for node in gm.graph.nodes if node.target is F.linear)
    with torch.no_grad():
        verdict = spike_linear.consider(layer, Context(gm, Options(implementation="binary"), Report(), analyse(gm)))
    assert bool(verdict) == (device == "cuda")
    assert verdict or str(verdict) == "the factor factor of the spikes is on cpu"


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    ("precision", "width", "trained", "digits", "spread"),
    [("exact", 20, False, 3, 20.0), ("exact", 21, False, 4, 5120.0), ("exact", 5120, False, 4, 5120.0),
     ("exact", 5121, False, None, None), ("exact", 1, True, 4, 5120.0), ("tf32", 20, False, 2, 20.0),
     ("tf32", 5121, False, 4, 1310720.0), ("tf32", 1310721, False, None, None)],
)  # fmt: skip
def test_a_byte_more_holds_a_channel_that_is_256_times_as_wide(precision, width, trained, digits, spread):
    """In medians of the channel; in training it is expected to grow to 100 of them."""
    weight = torch.full((3, 5), 0.25, requires_grad=trained)
    with torch.no_grad():
        weight[0, 0], weight[1, 1], weight[2] = -0.25 * width, 0, 0
    with torch.set_grad_enabled(trained):
        (reason,), gm = told(lambda x, w: F.linear(spikes(x), w), torch.ones(3, 5), weight, precision=precision)
    if digits is None:
        assert "differ so much" in reason
    else:
        assert f"{digits}, 'binary', 1.0, None, False, {spread}, " in gm.code


def test_a_number_beyond_the_dtype_of_autocast_is_not_taken():
    with torch.autocast("cpu", torch.float16):
        found, _ = told(lambda x, w: F.linear(spikes(x) * 70000.0, w), signal(3, 4), signal(5, 4, seed=2))
    assert found == ["the factor 70000.0 of the spikes is beyond torch.float16"]


def test_a_layer_that_pads_otherwise_than_with_zeros_is_not_taken():
    model, x = OnSpikes(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")), signal(1, 4, 6, 6)
    assert told(model, x, eager=True)[0] == ["padding mode 'reflect' is not zeros"]


def test_a_cast_is_left_out_only_where_the_dtype_is_known_to_be_that():
    graph = fx.Graph()
    known, unknown = graph.placeholder("known"), graph.placeholder("unknown")
    known.meta["example_value"] = torch.zeros(2)
    output = graph.output((known, unknown))
    assert cast(known, torch.float32, output) is known
    for node, dtype in ((known, torch.float16), (unknown, torch.float32)):
        made = cast(node, dtype, output)
        assert (made.op, made.target, made.args) == ("call_method", "to", (node, dtype))


TRANSFORMS = {
    "grad": lambda call, x, w: torch.func.grad(lambda w: call(x, w).square().sum())(w),
    "vjp": lambda call, x, w: torch.func.vjp(lambda w: call(x, w), w)[1](torch.ones(4, 8))[0],
    "jacrev": lambda call, x, w: torch.func.jacrev(lambda w: call(x, w))(w),
    "jvp": lambda call, x, w: torch.func.jvp(lambda w: call(x, w), (w,), (torch.ones_like(w),))[1],
    "vmap": lambda call, x, w: torch.vmap(lambda w: call(x, w))(torch.stack([w, 2 * w])),
    "vmap of grad": lambda call, x, w: torch.vmap(
        torch.func.grad(lambda w: call(x, w).square().sum())
    )(torch.stack([w, 2 * w])),
}  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("inside", [True, False])
def test_transforms_inside_and_around(transform, inside):
    x, w = signal(4, 16), signal(8, 16, seed=2)

    def layer(x, w):
        return F.linear(spikes(x), w)

    expected = transform(layer, x, w)
    options = {"implementation": "binary"}
    if inside:
        found = torch.compile(
            lambda x, w: (transform(layer, x, w), layer(x, w)), backend="sparsecomp", options=options
        )(x, w)[0]
        first, last = (sites := sparsecomp.last_report().sites)[0], sites[-1]
        assert not first.rewritten and "torch.func" in first.reason and last.rewritten
    else:
        found = transform(torch.compile(layer, backend="sparsecomp", options=options), x, w)
    torch.testing.assert_close(found, expected)


def test_second_derivatives_after_optimize():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    fire = OnSpikes(model)
    optimized, x = sparsecomp.optimize(fire, signal(2, 3, 6, 6), implementation="binary"), signal(2, 3, 6, 6)
    assert optimized.report.rewritten
    found = []
    for call in (fire, optimized):
        first = torch.autograd.grad(call(x).pow(3).sum(), list(fire.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(fire.parameters())))
    for mine, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("x", "w"), [((3, 0), (8, 0)), ((3, 4), (0, 4)), ((3, 0, 5, 5), (8, 0, 3, 3))])
def test_layers_of_no_features_stay_dense(x, w):
    layer = F.linear if len(w) == 2 else F.conv2d
    with torch.no_grad():
        found, report = compiled(lambda x, w: layer(spikes(x), w), torch.ones(x), torch.ones(w))
    assert "no features" in report.sites[-1].reason
    assert torch.equal(found, layer(torch.ones(x), torch.ones(w)))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("depth", "most", "taken"),
    [(2**17 + 2**11, 1, True), (2**17 + 2**11, 127, False), (2**18, 64, False), (2**18 - 1, 64, True),
     (2**18, -64, False), (2**18 - 1, -64, True)],
)  # fmt: skip
def test_sums_that_could_pass_32_bits_stay_dense(depth, most, taken):
    """A byte of a weight reaches -128, so that `depth` products reach 2^31 with counts of 2^24 / depth."""
    inputs = torch.full((1, depth), 1.0), torch.full((1, depth), 1.0)
    (reason,), gm = told(lambda x, w: F.linear(spikes(x) * most, w), *inputs)
    assert reason == ("" if taken else f"sums over {depth} inputs could pass 32 bits")
    assert gm(*inputs).item() == pytest.approx(most * depth, rel=1e-6)


@pytest.mark.slow(reason="compiles training at many sizes")
@pytest.mark.parametrize("strategy", ["binary", "event"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_strided_pixel_layer_trains_at_any_size(strategy, layout):
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Identity(), nn.Conv2d(8, 16, 1, stride=2, bias=False))
    other = copy.deepcopy(model)
    run = lambda net, x: net[2](Surrogate.apply(net[0](x)))  # noqa: E731
    with torch._inductor.config.patch(force_disable_caches=True):
        options = {"implementation": strategy}
        call = torch.compile(lambda x: run(model, x), backend="sparsecomp", dynamic=True, options=options)
        for n in (2, 3, 5):
            x = signal(n, 4, 6 + n, 7).contiguous(memory_format=layout)
            found, expected = call(x), run(other, x)
            assert site(sparsecomp.last_report(), "spike_conv").rewritten
            for net, out in ((model, found), (other, expected)):
                net.zero_grad()
                out.square().sum().backward()
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


def test_what_the_model_refuses_is_raised_as_the_model_says_it(caplog):
    model, bad = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(2, 9)
    with pytest.raises(RuntimeError) as eager:
        model(bad)
    with pytest.raises(RuntimeError) as ours:
        sparsecomp.optimize(model, bad)
    assert str(ours.value) == str(eager.value) and ours.value.__context__ is None
    assert "torch.compile failed" not in caplog.text


@pytest.mark.slow(reason="compiles training")
@pytest.mark.parametrize(("kind", "shape"), [(nn.Conv1d, (2, 4, 9)), (nn.Conv2d, (2, 4, 9, 9))])
def test_a_layer_with_hooks_keeps_them(kind, shape):
    """At the level of modules; the hook's negation is in the result."""
    layer, x = dyadic(kind(4, 4, 3)), signal(*shape)
    model = OnSpikes(layer).eval()
    layer.register_forward_hook(lambda module, inputs, output: operator.neg(output))
    traced = pipeline.run_rules(torch.fx.symbolic_trace(model), Options(implementation="binary"), eager=True)
    assert [found.reason for found in traced.sites if found.rule == "spike_conv"] == ["the module has hooks"]
    plain = F.conv1d if kind is nn.Conv1d else F.conv2d
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    with torch.no_grad():
        assert torch.equal(optimized(x), -plain(spikes(x), layer.weight, layer.bias))


class Trained(nn.Module):
    """A layer behind a library's neuron, into which Inductor cannot look."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = torch.zeros_like(x[0])
        found = torch.ops.sj_lif.forward.default(x, v, 2.0, True, 1.0, 0.0, False, 4.0, False, 0)[0]
        return self.conv(found.flatten(0, 1))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_spikes_of_a_neuron_that_is_trained_are_cast_in_a_pass_of_their_own(mode):
    """The layer is judged as one whose input is read at four bytes and written at one, which then does not pay."""
    pytest.importorskip("spikingjelly._ops.lif")
    model, x = Trained().to(memory_format=torch.channels_last), torch.rand(4, 32, 64, 28, 28)
    how: dict[str, Any] = {"device": "h200", "precision": "tf32", "mode": mode}
    report = sparsecomp.explain(model, x, **how)
    assert not next(one for one in report.sites if one.rule == "spike_conv").rewritten
    with torch.no_grad():
        report = sparsecomp.explain(model, x, **how)
    assert next(one for one in report.sites if one.rule == "spike_conv").implementation == "binary"
