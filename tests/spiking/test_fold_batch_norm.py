"""Batch-norm behind a rewritten convolution, in graphs that run op by op."""

import copy

import pytest
import torch
from rewriting import rewritten, site
from torch import nn

import sparsecomp

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
    assert not found.rewritten and "Inductor fuses" in found.reason
