"""Every operator inside a CUDA graph: a replay must see inputs and weights written after the capture."""

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import graph_of

import sparsecomp.ops as ops
from sparsecomp.reference.digits import SPREAD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("implementation", ["binary", "direct", "event", "skip"])
@pytest.mark.parametrize("later_density", [0.0, 0.02, 0.9])
def test_convolution_replays_on_new_values(implementation, later_density):
    x = (torch.rand(2, 32, 9, 9, device="cuda") < 0.02).float().contiguous(memory_format=torch.channels_last)
    w = torch.randn(48, 32, 3, 3, device="cuda")
    graph, out = graph_of(lambda: ops.spike_conv(x, w, None, [1, 1], [1, 1], [1, 1], 1, 3, implementation))
    x.copy_(torch.rand_like(x) < later_density)
    w.copy_(torch.randn_like(w))
    graph.replay()
    torch.cuda.synchronize()
    expected = F.conv2d(x.double(), w.double(), padding=1)
    assert (out - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("implementation", ["binary", "direct", "event", "skip"])
def test_linear_replays_on_new_values(implementation):
    x, w = (torch.rand(70, 64, device="cuda") < 0.02).float(), torch.randn(96, 64, device="cuda")
    graph, out = graph_of(lambda: ops.spike_linear(x, w, None, 3, implementation))
    x.copy_(torch.rand_like(x) < 0.3)
    w.copy_(torch.randn_like(w))
    graph.replay()
    torch.cuda.synchronize()
    expected = F.linear(x.double(), w.double())
    assert (out - expected).norm() <= 1e-6 * expected.norm()


def test_neuron_replays_on_new_values():
    x = torch.randn(4, 2, 8, 5, 5, device="cuda")
    args = (None, 0.0, None, None, None, None, 0.0, "lif", 2.0, None, True, 0.5, 0.0)
    graph, (spikes, last) = graph_of(lambda: ops.lif(x, *args))
    x.copy_(2 * torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    expected, membrane = ops.lif(x.cpu(), *args)
    assert torch.equal(spikes.cpu(), expected)
    torch.testing.assert_close(last.cpu(), membrane)


def test_described_neuron_replays_on_new_values():
    x, v, decay = torch.randn(4, 2, 8, 5, 5, device="cuda"), *(torch.rand(8, 1, 1, device="cuda") for _ in range(2))
    step = "t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; t3 = float t2; t4 = sub t1 t3; spike t2; v0 t4"
    start = v.expand(2, 8, 5, 5).contiguous()
    graph, (spikes, last, _) = graph_of(lambda: ops.neuron(x, [start], [0.0], [decay], [1.0], step))
    for tensor in (x, start, decay):
        tensor.copy_(2 * torch.rand_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    expected, membrane, _ = ops.neuron(x.cpu(), [start.cpu()], [0.0], [decay.cpu()], [1.0], step)
    assert torch.equal(spikes.cpu(), expected) and torch.equal(last.cpu(), membrane)


def test_an_eager_call_sees_a_weight_written_in_place():
    x = (torch.rand(2, 32, 6, 6, device="cuda") < 0.2).float()
    w = torch.randn(32, 32, 3, 3, device="cuda")
    for implementation in ("binary", "direct", "event", "skip", "binary"):
        w.mul_(-1.5)
        out = ops.spike_conv(x, w, None, [1, 1], [1, 1], [1, 1], 1, 3, implementation)
        expected = F.conv2d(x.double(), w.double(), padding=1)
        assert (out - expected).norm() <= 1e-6 * expected.norm()


def test_a_layer_with_its_neurons_replays_on_new_values():
    x = (torch.rand(16, 64, 9, 7, device="cuda") < 0.2).to(torch.int8).contiguous(memory_format=torch.channels_last)
    w = torch.randn(96, 64, 3, 3, device="cuda") / 8
    start = torch.zeros(4, 96, 9, 7, device="cuda").contiguous(memory_format=torch.channels_last)
    how = (None, [1, 1], [1, 1], [1, 1], 1, 3)
    neuron = (start, 0.0, None, None, None, None, 0.0, "lif", 2.0, None, True, 0.5, 0.0)
    residual = torch.ones(4, 4, 96, 9, 7, dtype=torch.int8, device="cuda")
    joins = (residual, "iand", None, True)
    graph, found = graph_of(lambda: ops.conv_lif(x, w, *how, 1.0, SPREAD, True, 4, *neuron, True, *joins))
    residual.random_(4)
    x.copy_(torch.rand(x.shape, device="cuda") < 0.4)
    w.copy_(torch.randn_like(w) / 8)
    start.uniform_(-1, 0.4)
    graph.replay()
    torch.cuda.synchronize()
    current = torch.ops.sparsecomp.spike_conv_counts(x, w, *how, "binary", 1.0, None, SPREAD, True)
    current = current.unflatten(0, (4, 4))
    spikes, last = ops.lif(current, *neuron)
    torch.testing.assert_close(found, (residual * (1 - spikes), last, current), rtol=0, atol=0)
