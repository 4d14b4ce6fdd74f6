"""What a hostile user does: states, modes and inputs that no single part expects. The oracle is the eager model."""

import torch
from rewriting import Surrogate, rewritten, site
from torch import nn


def _signal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_gradients_enabled_inside_the_graph_pass_through_scaled_spikes():
    conv = nn.Conv2d(4, 8, 3)

    def model(x):
        with torch.enable_grad():
            return conv(Surrogate.apply(x) * 0.3)

    inputs = [_signal(2, 4, 6, 6).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        found, report = rewritten(model, inputs[0])
        expected = model(inputs[1])
    assert site(report, "spike_conv").rewritten
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
