"""Compiled spiking networks on a real GPU: rewritten by the gate's own choice, and equal to eager."""

import pytest
import torch
from rewriting import Surrogate, dyadic
from torch import nn

import sparsecomp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Net(nn.Module):
    """Two hand-written leaky neurons around a convolution, over four time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = w = x.new_zeros(())
        total = x.new_zeros(())
        current = self.stem(x)
        for _ in range(4):
            v = v / 2 + current
            s = (v >= 4.0).to(x.dtype)
            v = v * (1 - s)
            w = w / 2 + self.conv(s)
            fired = (w >= 4.0).to(x.dtype)
            w = w * (1 - fired)
            total = total + fired
        return self.head(total.mean((2, 3)))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_compiled_equals_eager_with_dyadic_weights(mode, channels_last):
    net = dyadic(Net()).cuda().eval()
    x = torch.randint(-4, 5, (64, 3, 56, 56), device="cuda").float() / 4
    if channels_last:
        net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(net, backend="sparsecomp", mode=mode)
    with torch.no_grad():
        expected = net(x)
        for _ in range(3):
            found = compiled(x).clone()
    assert any(site.implementation == "binary" for site in sparsecomp.last_report().rewritten)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_training_gradients_equal_eager():
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, 3, padding=1).cuda()
    x = torch.randn(64, 64, 28, 28, device="cuda", requires_grad=True)

    def step(layer: nn.Module, value: torch.Tensor) -> torch.Tensor:
        return layer(Surrogate.apply(value - 0.5))

    found = []
    for run in (step, torch.compile(step, backend="sparsecomp", options={"implementation": "binary"})):
        loss = run(conv, x).square().mean()
        found.append(torch.autograd.grad(loss, (x, *conv.parameters())))
    assert any(site.implementation == "binary" for site in sparsecomp.last_report().rewritten)
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)


def test_spikingjelly_neurons_fuse():
    neuron, layer, functional = (
        pytest.importorskip(f"spikingjelly.activation_based.{name}") for name in ("neuron", "layer", "functional")
    )
    torch.manual_seed(0)
    net = nn.Sequential(
        layer.Conv2d(3, 64, 3, padding=1), layer.BatchNorm2d(64), neuron.LIFNode(),
        layer.Conv2d(64, 64, 3, padding=1), layer.BatchNorm2d(64), neuron.LIFNode(),
    ).cuda().eval()  # fmt: skip
    functional.set_step_mode(net, "m")
    for norm in (net[1], net[4]):
        norm.running_var.fill_(0.05)
    x = torch.rand(4, 16, 3, 32, 32, device="cuda")
    with torch.no_grad():
        expected = net(x)
        functional.reset_net(net)
        found = torch.compile(net, backend="sparsecomp")(x)
    rules = {site.rule for site in sparsecomp.last_report().rewritten}
    assert {"fuse_neurons", "spike_conv", "narrow_spikes"} <= rules
    assert 0.01 < expected.mean() < 0.99
    assert (found != expected).float().mean() < 1e-4
