"""spikingjelly's models, small: every neuron's spikes as eager's, and every weight layer on spikes rewritten.

The expected counts are read off the architectures: all weight layers, less those on the image or on an analog value.
"""

import importlib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from snn_fixtures import stub_torchvision
from snn_zoo import (
    WEIGHT_RULES,
    Run,
    assert_exact,
    compiler,
    gradients_beside_eager,
    images,
    run_beside_eager,
    sixteenths,
)
from torch import nn

pytest.importorskip("spikingjelly", reason="spikingjelly is not installed")

pytestmark = pytest.mark.quick_cases(1)

VGG11 = [16, "M", 32, "M", 32, 32, "M", 32, 32, "M", 32, 32, "M"]


@pytest.fixture(autouse=True)
def no_torchvision(monkeypatch):
    stub_torchvision(monkeypatch)


def _sj(name: str) -> Any:
    return importlib.import_module(f"spikingjelly.activation_based.{name}")


def _neurons() -> tuple[type[nn.Module], ...]:
    return (_sj("neuron").BaseNode,)


def _multi(model: nn.Module) -> nn.Module:
    _sj("functional").set_step_mode(model, "m")
    return model


def _resnet(module: str, name: str, neuron: str, **options: Any) -> nn.Module:
    build = getattr(_sj(f"model.{module}"), name)
    return _multi(build(num_classes=10, spiking_neuron=getattr(_sj("neuron"), neuron), **options))


def _vgg(neuron: str = "LIFNode", **options: Any) -> nn.Module:
    """Spiking VGG-11 with narrow layers; the zoo fixes the classifier at 100 million weights."""
    with torch.device("meta"):
        kind = getattr(_sj("neuron"), neuron)
        model = _sj("model.spiking_vgg").SpikingVGG(
            VGG11, num_classes=10, init_weights=False, spiking_neuron=kind, **options
        )
    linear, head = _sj("layer").Linear, model.classifier
    head[0], head[3], head[6] = linear(32 * 7 * 7, 64), linear(64, 64), linear(64, 10)
    return _multi(model.to_empty(device="cpu"))


def _plif_net(name: str, channels: int, neuron: str) -> nn.Module:
    build = getattr(_sj("model.parametric_lif_net"), name)
    return _multi(build(channels, spiking_neuron=getattr(_sj("neuron"), neuron)))


def _spikformer(steps: int = 4) -> nn.Module:
    return _sj("model.spikformer").Spikformer(
        T=steps, img_size_h=16, img_size_w=16, patch_size=4, num_classes=10, embed_dims=32, num_heads=2, depths=1
    )


def _qkformer(kind: str) -> nn.Module:
    return _sj("model.qkformer").QKFormer(
        T=4, num_classes=10, embed_dims=32, num_heads=(1, 2, 2), depths=(1, 1, 1), qka_type=kind
    )


def _maxformer(**options: Any) -> nn.Module:
    return _sj("model.maxformer").MaxFormer(T=4, num_classes=10, embed_dims=32, depths=(1, 1, 1), **options)


def _sdt() -> nn.Module:
    return _sj("model.spike_driven_transformer").SpikeDrivenTransformer(
        T=4, num_classes=10, embed_dims=32, num_heads=2, depths=1
    )


def _ms_resnet(name: str) -> nn.Module:
    return getattr(_sj("model.ms_resnet"), name)(T=4, num_classes=10, base_channels=8, tau=2.0)


def _masnn() -> nn.Module:
    return _sj("model.masnn").MASNN(T=4, num_classes=10, channels=(16, 16, 16), reduction_t=2, reduction_c=4)


def _ottt_vgg() -> nn.Module:
    return _sj("model.spiking_vggws_ottt").OTTTSpikingVGG(
        [16, 32, "M", 32, 512, "M"], weight_standardization=False, num_classes=10,
        spiking_neuron=_sj("neuron").OTTTLIFNode,
    )  # fmt: skip


def _snasnet() -> nn.Module:
    args = Namespace(
        dataset="cifar10", second_avgpooling=8, timestep=1, celltype="forward", threshold=1.0, tau=2.0
    )  # fmt: skip
    connections = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 0, 0]])
    return _sj("model.snas_net").SNASNet(args, connections)


IMAGE = (4, 1, 3, 32, 32)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # 20 convolutions and a linear, the stem on the image; the last map is 1x1, so that pooling changes nothing
    "SEW-ResNet-18 ADD": (lambda: _resnet("sew_resnet", "sew_resnet18", "IFNode", cnf="ADD"), IMAGE, 20),
    "SEW-ResNet-18 IAND": (lambda: _resnet("sew_resnet", "sew_resnet18", "ParametricLIFNode", cnf="IAND"), IMAGE, 20),
    "SEW-ResNet-34 ADD": (lambda: _resnet("sew_resnet", "sew_resnet34", "IFNode", cnf="ADD"), IMAGE, 36),
    "spiking ResNet-18": (lambda: _resnet("spiking_resnet", "spiking_resnet18", "LIFNode"), IMAGE, 20),
    # 16 convolutions in blocks, and the head on a 1x1 map; stem and shortcuts see analog values
    "MS-ResNet-18": (lambda: _ms_resnet("MSResNet"), IMAGE, 17),
    "Max-ResNet-18": (lambda: _ms_resnet("MaxResNet"), IMAGE, 17),
    # 8 convolutions less the first; 3 linears less the one behind the pool from 1x1 to 7x7
    "VGG-11 LIF": (_vgg, IMAGE, 10),
    "VGG-11 batch-norm EIF": (lambda: _vgg("EIFNode", batch_norm=True), IMAGE, 10),
    "MNISTNet PLIF": (lambda: _plif_net("MNISTNet", 16, "ParametricLIFNode"), (4, 1, 1, 28, 28), 3),
    "CIFAR10Net QIF": (lambda: _plif_net("CIFAR10Net", 16, "QIFNode"), IMAGE, 7),
    "CIFAR10DVSNet LIF": (lambda: _plif_net("CIFAR10DVSNet", 4, "LIFNode"), (2, 1, 2, 128, 128), 5),
    "DVSGestureNet LIF": (lambda: _plif_net("DVSGestureNet", 4, "LIFNode"), (2, 1, 2, 128, 128), 6),
    # attention turns spikes into analog values for its own layers: 2 convolutions and 2 linears see spikes
    "MA-SNN": (_masnn, (4, 1, 2, 32, 32), 4),
    "OTTT VGG": (_ottt_vgg, (1, 3, 32, 32), 4),
    # 3 convolutions in each of 2 cells, 1 between them, and 2 linears
    "SNASNet": (_snasnet, (1, 3, 32, 32), 9),
    # 4 convolutions of the patch embedding, 4 conv1d of the block, and the head, on the mean of 16 tokens
    "Spikformer": (_spikformer, (4, 1, 3, 16, 16), 9),
    # 9 convolutions of the patch embeddings, 12 conv1d of the three blocks, and the head, on the mean of 16 tokens
    "QKFormer token": (lambda: _qkformer("token"), IMAGE, 22),
    "QKFormer channel": (lambda: _qkformer("channel"), IMAGE, 22),
    # embeddings 3 + 3 + 3, two blocks of 3, 2 beside the attention, its conv1d, and the head
    "MaxFormer": (_maxformer, IMAGE, 19),
    "MaxFormer CIFAR": (lambda: _maxformer(cifar=True), IMAGE, 18),
    # patch embedding 4, attention 4, perceptron 2, head 1 (the mean of 4 steps)
    "Spike-driven Transformer": (_sdt, IMAGE, 11),
}


@cache
def _evaluated(name: str) -> Run:
    build, shape, _ = MODELS[name]
    return run_beside_eager(sixteenths(build()).eval(), [(images(*shape),)], _neurons())


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_is_exact_and_every_spike_layer_is_rewritten(name):
    run = _evaluated(name)
    assert_exact(run)
    assert len(run.reports) == 1
    assert run.rewritten() == MODELS[name][2]


def _domains(run: Run) -> Counter[str]:
    """How many rewritten layers see each domain."""
    sites = [site for site in run.reports[0].sites if site.rewritten and site.rule in WEIGHT_RULES]
    return Counter(site.reason.split(" from ")[0].removeprefix("input is ") for site in sites)


BETWEEN = {
    # the second convolution of 8 blocks and the first block's first see spikes; residual sums grow within a stage
    "SEW-ResNet-18 ADD": {"{0, 1}": 9, "integers 0..2": 4, "integers 0..3": 7},
    "SEW-ResNet-18 IAND": {"{0, 1}": 20},
    "MS-ResNet-18": {"{0, 1}": 17},
    "VGG-11 LIF": {"{0, 1}": 10},
    # each block adds two sums of two, so that stage 2 starts from 4
    "QKFormer token": {
        "{0, 1}": 11, "integers 0..2": 3, "integers 0..3": 3, "integers 0..4": 4, "integers 0..64 x 0.0625": 1,
    },  # fmt: skip
    "Spike-driven Transformer": {"{0, 1}": 10, "integers 0..4 x 0.25": 1},
}


@pytest.mark.slow(reason="models of a library")
@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_a_spike_and_the_next_weight_layer(name):
    assert _domains(_evaluated(name)) == BETWEEN[name]


BLOCKS = {
    # behind the stem 8 blocks of two layers: the last of each gives a sum that the next block's shortcut reads, but one
    "MS-ResNet-18": (16, 7), "Max-ResNet-18": (13, 7), "Spike-driven Transformer": (8, 2),
}  # fmt: skip


@pytest.mark.slow(reason="models of a library")
@pytest.mark.parametrize("name", BLOCKS)
def test_sums_of_blocks_are_written_by_the_launch_of_a_layer_and_its_neurons(name):
    build, shape, _ = MODELS[name]
    model, x, reports = sixteenths(build()).eval(), images(*shape), []
    with torch.no_grad():
        expected = model(x)
        _sj("functional").reset_net(model)
        found = torch.compile(model, backend=compiler(reports, neurons="fuse"))(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    fused = [site.reason for site in reports[0].sites if site.rule == "fuse_conv_neuron" and site.rewritten]
    assert (len(fused), sum("is written for others" in reason for reason in fused)) == BLOCKS[name]


SMALL = {
    "MNISTNet": (lambda: _plif_net("MNISTNet", 4, "ParametricLIFNode"), (1, 28, 28), 3),
    "VGG-11": (_vgg, (3, 32, 32), 10),
}


@pytest.mark.slow(reason="models of a library")
@pytest.mark.parametrize("mode", ["m", "s"])
@pytest.mark.parametrize("name", SMALL)
def test_state_carries_over_calls_and_resets(name, mode):
    build, shape, count = SMALL[name]
    model = sixteenths(build()).eval()
    _sj("functional").set_step_mode(model, mode)
    steps = (2, 1) if mode == "m" else (1,)
    calls = [(images(*steps, *shape, seed=seed),) for seed in range(4)]
    run = run_beside_eager(model, calls, _neurons(), reset=_sj("functional").reset_net, rounds=2)
    assert_exact(run)
    # the potential is a number in the first call and a tensor from then on: two graphs, as with any backend
    assert [run.rewritten(graph) for graph in range(len(run.reports))] == [count, count]


@pytest.mark.slow(reason="compiles training")
def test_one_step():
    build, (_, *shape), count = MODELS["SEW-ResNet-18 ADD"]
    run = run_beside_eager(sixteenths(build()).eval(), [(images(1, *shape),)], _neurons())
    assert_exact(run)
    assert run.rewritten() == count


@pytest.mark.slow(reason="models of a library")
def test_through_our_decompositions():
    """The packed operators that Inductor would get, on AOTAutograd's graph."""
    build, shape, count = SMALL["MNISTNet"]
    run = run_beside_eager(sixteenths(build()).eval(), [(images(4, 2, *shape),)], _neurons(), how="aot")
    assert_exact(run)
    assert run.rewritten() == count


TRAINED = {name: MODELS[name] for name in ("SEW-ResNet-18 ADD", "MS-ResNet-18", "Spikformer", "QKFormer token")}
# dropout doubles a spike: still a whole number times a power of two; its mask is drawn as in eager
TRAINED |= {"VGG-11": MODELS["VGG-11 LIF"], "MNISTNet": MODELS["MNISTNet PLIF"]}


@pytest.mark.slow(reason="compiles training")
@pytest.mark.parametrize("name", TRAINED)
def test_training_fires_the_same_and_has_the_same_gradients(name):
    build, shape, count = TRAINED[name]
    torch.manual_seed(0)
    model = sixteenths(build()).train()
    expected, found = gradients_beside_eager(model, (images(*shape),), _neurons())
    assert found.rewritten == count
    assert found.flips(expected) == 0
    found.assert_close(expected)
