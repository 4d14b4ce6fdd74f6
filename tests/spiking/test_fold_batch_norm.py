"""Batch-norm behind a rewritten convolution, in graphs that run op by op."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Examples, OnSpikes, rewritten, site
from torch import Tensor, fx, nn

import sparsecomp
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.spiking import fold_batch_norm

neuron, functional, layer = (
    pytest.importorskip(f"spikingjelly.activation_based.{name}") for name in ("neuron", "functional", "layer")
)


def _model(step_mode: str = "s", **norm: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(neuron.IFNode(v_threshold=0.5), layer.Conv2d(8, 16, 3), layer.BatchNorm2d(16, **norm))
    functional.set_step_mode(model, step_mode)
    with torch.no_grad():
        for tensor in (*model[2].parameters(), *model[2].buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2.0)
    return model.eval()


def _fold(model: nn.Module, x: torch.Tensor):
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    return optimized, site(optimized.report, "fold_batch_norm")


@pytest.mark.parametrize("step_mode", ["s", "m"])
@pytest.mark.parametrize("affine", [True, False])
def test_folding_keeps_the_result(step_mode, affine):
    model = _model(step_mode, affine=affine)
    x = torch.randn(*((3, 2) if step_mode == "m" else (2,)), 8, 6, 6)
    optimized, found = _fold(model, x)
    assert found.rewritten, found.reason
    with torch.no_grad():
        got = optimized(x)
        functional.reset_net(model)
        spikes = model[0](x).double()
        expected = copy.deepcopy(model[1:]).double()(spikes)
    assert (got.double() - expected).abs().max() / expected.abs().max() < 1e-6


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "groups"), [(8, 1), (12, 1), (12, 4)])
def test_each_output_channel_gets_its_own_statistics(kind, dims, outputs, groups):
    """Of any number of dimensions, as many inputs as outputs or not: beside float64."""
    torch.manual_seed(0)
    conv = getattr(nn, f"{kind}{dims}d")(8, outputs, 3, groups=groups)
    norm = getattr(nn, f"BatchNorm{dims}d")(outputs)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    model = OnSpikes(nn.Sequential(conv, norm)).eval()
    x = torch.randn(2, 8, *(5, 4, 6)[:dims])
    optimized, found = _fold(model, x)
    assert found.rewritten, found.reason
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        torch.testing.assert_close(optimized(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_changed_weights_and_statistics_are_seen():
    model, x = _model(), torch.randn(2, 8, 6, 6)
    optimized, _ = _fold(model, x)
    with torch.no_grad():
        model[1].weight.mul_(2)
        model[2].running_mean.add_(1)
        model[2].running_var.mul_(3)
        got = optimized(x)
        functional.reset_net(model)
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)


def test_training_mode_uses_the_batchs_statistics():
    model, x = _model(), torch.randn(2, 8, 6, 6)
    optimized, _ = _fold(model, x)
    optimized.train()
    reference = copy.deepcopy(model)
    torch.testing.assert_close(optimized(x), reference(x))
    torch.testing.assert_close(model[2].running_mean, reference[2].running_mean)


def test_a_model_in_training_is_not_folded():
    found = _fold(_model().train(), torch.randn(2, 8, 6, 6))[1]
    assert not found.rewritten and "batch statistics" in found.reason


def test_under_inductor_it_stays():
    model = _model()
    with torch.no_grad():
        _, report = rewritten(model, torch.randn(2, 8, 6, 6))
    found = site(report, "fold_batch_norm")
    assert not found.rewritten and "Inductor, or the neurons" in found.reason


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    geometry = [1, 1], [0, 0], [1, 1], 1
    promise = 1.0, None, False, 20.0, False
    return torch.ops.sparsecomp.spike_conv.default(x, weight, bias, *geometry, 3, "binary", *promise)


def _norm(y: Tensor, **how: Any) -> Tensor:
    number = torch.arange(1.0, 6.0).to(how.pop("dtype", torch.float32))
    return F.batch_norm(y, -number, number, how.pop("weight", None), how.pop("bias", None), eps=0.25, **how)


def _written(x: Tensor, w: Tensor, which: str, before: bool = False) -> Tensor:
    x, w = x + 0, w + 0
    if before:
        {"x": x, "w": w}[which].mul_(2)
    y = _conv(x, w)
    if not before:
        {"x": x, "w": w}[which].mul_(2)
    return _norm(y)


def _read_too(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = _conv(x, w)
    return _norm(y), y


WHAT: dict[str, tuple[Callable[..., Any], str]] = {
    "plain": (lambda x, w: _norm(_conv(x, w)), ""),
    "bias": (lambda x, w: _norm(_conv(x, w, w[:, 0, 0, 0])), ""),
    "weight": (lambda x, w: _norm(_conv(x, w), weight=w[:, 0, 1, 1]), ""),
    "all": (lambda x, w: _norm(_conv(x, w, w[:, 1, 0, 1]), weight=w[:, 0, 1, 1], bias=w[:, 1, 0, 0]), ""),
    "training": (lambda x, w: _norm(_conv(x, w), training=True), "batch statistics"),
    "read too": (_read_too, "other consumers"),
    "input written": (lambda x, w: _written(x, w, "x"), "written to in place"),
    "weight written": (lambda x, w: _written(x, w, "w"), "written to in place"),
    "input written before": (lambda x, w: _written(x, w, "x", True), ""),
    "half": (lambda x, w: _norm(_conv(x.half(), w.half()), dtype=torch.float16), "half-precision"),
    "time apart": (
        lambda x, w: F.batch_norm(torch.unflatten(_conv(x, w), 0, (3, 2)), torch.ones(2), torch.ones(2)), None,
    ),
    "another product": (lambda x, w: _norm(F.conv2d(x, w)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", WHAT)
def test_what_is_folded(name):
    """Against the same graph, run as it was."""
    model, told = WHAT[name]
    random = torch.Generator().manual_seed(0)
    x, w = (torch.rand(6, 4, 5, 5, generator=random) > 0.5).float(), torch.randn(5, 4, 3, 3, generator=random)
    gm = fx.symbolic_trace(model)
    Examples(gm).run(x, w)
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = str(node.target)
    expected = model(x, w)
    report = pipeline.run_rules(gm, Options(strict=True), eager=True, rules=[fold_batch_norm.RULE])
    assert all(node.meta["stack_trace"] == str(node.target) for node in gm.graph.nodes if "conv" in str(node.target))
    torch.testing.assert_close(gm(x, w), expected, rtol=1e-5, atol=1e-5)
    if told is None:
        assert not report.sites
    else:
        (found,) = report.sites
        assert found.rewritten == (told == "") and told in found.reason
