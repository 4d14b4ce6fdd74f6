"""Layers fused with the neurons that read them: which are, which are not, and that the spikes stay the same."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from multi_step import block, by_kernels, functional, images, layer, lif, lively, neuron
from rewriting import dyadic, rewritten, site
from torch import Tensor, nn

import sparsecomp
from sparsecomp.lowering.spiking.implementations import SiteInfo
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.passes.cost import conv_neuron as gate
from sparsecomp.passes.cost.conv_neuron import Behind
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.reference.geometry import Window

pytestmark = pytest.mark.quick_cases(1)

RULE = "fuse_conv_neuron"
TOGETHER = "with the neurons behind it in one launch, 4 time steps"


NEURONS = {
    "lif": lif,
    "if": lambda: neuron.IFNode(step_mode="m", v_threshold=0.75),
    "plif": lambda: neuron.ParametricLIFNode(init_tau=1.7, v_reset=None, step_mode="m"),
    "lif no decay": lambda: neuron.LIFNode(tau=3.0, decay_input=False, v_reset=0.1, step_mode="m"),
}


@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_bits_equal_the_operators_apart_over_two_calls(make):
    """The second call starts from the membranes of the first. Eager's batch-norm rounds differently."""
    x = images()
    eager, apart, model = (lively(nn.Sequential(*block(3, 16, make), *block(16, 24, make)), x) for _ in range(3))
    with torch.no_grad():
        for _ in range(2):
            expected, _ = rewritten(apart, x, neurons="fuse", disable=(RULE,))
            found, report = rewritten(model, x, neurons="fuse")
            assert 0.02 < expected.mean() < 0.98
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            torch.testing.assert_close(model[-1].v, apart[-1].v, rtol=0, atol=0)
            torch.testing.assert_close(found, eager(x), rtol=0, atol=0)
            torch.testing.assert_close(model[-1].v, eager[-1].v, rtol=1e-5, atol=1e-6)
    assert TOGETHER in site(report, RULE).reason and site(report, RULE).module.endswith("3")


class Mixed(nn.Module):
    """A network of random blocks: pooling, residual sums, views, linear layers, one and more readers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.stem = nn.Sequential(*block(3, 16, lif))
        self.blocks = nn.ModuleList()
        self.kinds: list[str] = []
        channels = 16
        for _ in range(draw.randint(2, 4)):
            kind = draw.choice(["plain", "residual", "pooled", "read twice", "grouped", "scaled"])
            outputs = channels if kind in ("residual", "read twice") else draw.choice([8, 16, 20])
            groups = 4 if kind == "grouped" else 1
            make = draw.choice(list(NEURONS.values()))
            self.blocks.append(nn.Sequential(*block(channels, outputs, make, groups=groups)))
            self.kinds.append(kind)
            channels = outputs
        self.head = nn.Sequential(
            layer.Linear(channels, 12, step_mode="m"), draw.choice([lif(), neuron.IFNode(step_mode="m")])
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for kind, part in zip(self.kinds, self.blocks, strict=True):
            if kind == "pooled":
                x = nn.functional.max_pool2d(x.flatten(0, 1), 2, 1, 1).unflatten(0, x.shape[:2])
            if kind == "scaled":
                x = 0.5 * x
            made = part(x)
            if kind == "residual":
                made = made + (x if made.shape == x.shape else 0)
            if kind == "read twice":
                made = (made + part[0](x).clamp(0, 1).round()).clamp(0, 1).round()
            x = made
        return self.head(x.amax((-2, -1)))


@pytest.mark.slow(reason="the interpreter runs whole networks")
@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("seed", range(12))
def test_random_networks_on_kernels_equal_their_launches_apart(seed):
    """Weights that round, too: bits are those of the kernels apart, whatever the order of sums."""
    x = images()
    found = []
    for disable in ((), (RULE,)):
        torch.manual_seed(seed)
        model = Mixed(seed)
        with torch.no_grad():
            lively(model, x, seed)
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 50)
            result, report = by_kernels(model, x, disable=disable)
            found.append((result, [one.v for one in model.modules() if isinstance(one, neuron.BaseNode)]))
    together, apart = found
    assert apart[0].any() or apart[1][-1].any()
    torch.testing.assert_close(together, apart, rtol=0, atol=0)


@pytest.mark.slow(reason="six networks are compiled twice")
def test_a_random_network_has_fused_layers_and_others():
    x, fused, all_of_them = images(), 0, 0
    for seed in range(6):
        model = lively(Mixed(seed), x, seed)
        with torch.no_grad():
            expected = model(x)
            functional.reset_net(model)
            result, report = rewritten(model, x, neurons="fuse")
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        sites = [one for one in report.sites if one.rule == RULE]
        fused, all_of_them = fused + sum(one.rewritten for one in sites), all_of_them + len(sites)
    assert 6 < fused <= all_of_them


class OnSpikes(nn.Module):
    """Spikes, a layer without batch-norm, and neurons, with something between or beside them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda y: y, made: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = made or nn.Conv2d(8, 8, 3, padding=1)
        self.between, self.neurons = between, lif()

    def forward(self, x: Tensor) -> Any:
        spikes = (x > 0.5).to(x.dtype)
        return self.neurons(self.between(self.layer(spikes.flatten(0, 1)).unflatten(0, x.shape[:2])))


class Kept(OnSpikes):
    """What the layer gives is returned as well, or something that is made of it ahead of the neurons."""

    def __init__(self, ahead: str = "") -> None:
        super().__init__()
        self.ahead = ahead

    def forward(self, x: Tensor) -> Any:
        current = self.layer((x > 0.5).float().flatten(0, 1))
        other = current.mean() if self.ahead else current
        if self.ahead == "given":
            self.neurons.v = 0.1 * current[:2] + 0.1
        return self.neurons(current.unflatten(0, x.shape[:2])), other


class Summed(OnSpikes):
    """A block of MS-ResNet: neurons and the next block read the sum of what the layer gives and of what skips it."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        current = self.layer((x > 0.5).float().flatten(0, 1)).unflatten(0, x.shape[:2])
        shortcut = x.transpose(0, 1).contiguous().transpose(0, 1) if self.kind == "turned" else x
        total = current.add_(x) if self.kind == "in place" else shortcut + current
        spikes = self.neurons(total)
        if self.kind == "behind the layer":
            return spikes, current
        return spikes, total.flatten(0, 1), total.mul_(2.0) if self.kind == "written to" else total + spikes


class Written(OnSpikes):
    """What the layer read is written to before the neurons read."""

    def forward(self, x: Tensor) -> Any:
        spikes = (x > 0.5).float().flatten(0, 1)
        current = self.layer(spikes)
        spikes.zero_()
        return self.neurons(current.unflatten(0, x.shape[:2])), spikes


class Transposed(OnSpikes):
    """Steps and images change places between the two."""

    def forward(self, x: Tensor) -> Any:
        current = self.layer((x > 0.5).float().flatten(0, 1))
        return self.neurons(current.unflatten(0, (2, 4)).flip(0).view(4, 2, *current.shape[1:]))


def _in_place(y: Tensor) -> Tensor:
    y.mul_(2.0)  # whose own result nobody reads
    return y


JUDGED: dict[str, tuple[Callable[[], nn.Module], int, str | None]] = {
    "plain": (OnSpikes, 4, "with the neurons behind it in one launch, 4 time steps"),
    "one step": (OnSpikes, 1, "in one launch, 1 time steps"),
    "many steps": (OnSpikes, 17, "17 time steps: blocks hold up to 16"),
    "read twice": (Kept, 4, "what the neurons are given is written for others, too"),
    "read before": (lambda: Kept("read"), 4, "what the neurons are given is written for others, too"),
    "read for the neurons": (lambda: Kept("given"), 4, "reads its result before all is there that the neurons read"),
    "sum read": (lambda: Summed(), 4, "what the neurons are given is written for others, too"),
    "sum read in place": (lambda: Summed("in place"), 4, "what the neurons are given is written for others, too"),
    "sum written to": (lambda: Summed("written to"), 4, "its result is written to in place"),
    "turned sum": (lambda: Summed("turned"), 4, "lies in another order"),
    "less than the sum": (lambda: Summed("behind the layer"), 4, "somebody else reads its result"),
    "written to": (Written, 4, "what it reads is written to before the neurons read"),
    "in place": (lambda: OnSpikes(_in_place), 4, "its result is written to in place"),
    "flipped": (Transposed, 4, None),
    "turned maps": (lambda: OnSpikes(lambda y: y.transpose(3, 4)), 4, None),
    "steps for images": (lambda: OnSpikes(lambda y: y.transpose(0, 1)), 2, None),
    "channels for lines": (lambda: OnSpikes(lambda y: y.transpose(2, 3), nn.Conv2d(8, 6, 3, padding=1)), 4, None),
    "channels apart": (
        lambda: OnSpikes(lambda y: y.view(4, 2, 4, 2, 6, 6)), 4, "the neurons' channels are not its outputs",
    ),
    "a sum": (lambda: OnSpikes(lambda y: y + 1), 4, None),
    "twice": (lambda: OnSpikes(lambda y: y + y), 4, None),
    "less": (lambda: OnSpikes(lambda y: torch.sub(y, torch.ones_like(y))), 4, None),
    "more of it": (lambda: OnSpikes(lambda y: torch.add(y, torch.ones_like(y), alpha=2)), 4, None),
    "one more": (lambda: OnSpikes(lambda y: y + torch.ones(6)), 4, "what is added is of another shape"),
    "doubles": (lambda: OnSpikes(lambda y: (y + torch.ones(y.shape, dtype=torch.double)).float()), 4, None),
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", JUDGED)
def test_which_layers_are_fused(name):
    make, steps, told = JUDGED[name]
    model, x = dyadic(make()).eval(), images(steps, 8)
    with torch.no_grad():
        expected = model(x)
        functional.reset_net(model)
        found, report = rewritten(model, x, neurons="fuse")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    sites = [one for one in report.sites if one.rule == RULE]
    assert [told in one.reason for one in sites] == ([True] if told else []) if told else not sites


@pytest.mark.parametrize("where", ["behind a linear layer", "of rows"])
def test_linear_layers(where):
    """Neurons of three dimensions have a linear layer's outputs as channels; of four they do not."""
    x = (torch.rand(4, 6, 16, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    x = x if where == "behind a linear layer" else x.view(4, 2, 3, 16)
    model = nn.Sequential(nn.ReLU(), lif(), nn.Linear(16, 24), lif())
    dyadic(model[2])
    with torch.no_grad():
        expected = model(2 * x)
        functional.reset_net(model)
        found, report = rewritten(model, 2 * x, neurons="fuse")
    assert 0.02 < expected.mean() < 0.98
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    judged = site(report, RULE)
    assert judged.rewritten == (x.dim() == 3)
    assert x.dim() == 3 or "channels are not its outputs" in judged.reason


def test_a_linear_layer_goes_on_from_the_membranes_of_the_call_before():
    x = (torch.rand(4, 6, 16, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    model = nn.Sequential(nn.ReLU(), lif(), nn.Linear(16, 24), lif())
    dyadic(model[2])
    with torch.no_grad():
        expected = [model(2 * x) for _ in range(2)]
        functional.reset_net(model)
        rewritten(model, 2 * x, neurons="fuse")
        found, report = rewritten(model, 2 * x, neurons="fuse")
    assert site(report, RULE).rewritten and not torch.equal(*expected)
    torch.testing.assert_close(found, expected[1], rtol=0, atol=0)


def test_membranes_that_nobody_reads_are_not_written():
    weight = torch.ones(8, 8, 3, 3)

    def model(x: Tensor) -> Tensor:
        current = nn.functional.conv2d((x > 0.5).float().flatten(0, 1), weight).unflatten(0, x.shape[:2])
        start = torch.zeros_like(current[0])
        return torch.ops.sj_lif.forward.default(current, start, 2.0, True, 4.0, 0.0, False, 4.0, False, 0)[0]

    with torch.no_grad():
        expected = model(images(4, 8))
        found, report = rewritten(model, images(4, 8), neurons="fuse")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert ", 'lif', 2.0, None, True, 4.0, 0.0, False)" in report.graph_after


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"implementation": "event"}, None), ({"implementation": "skip"}, None), ({"disable": (RULE,)}, None),
        ({"neurons": "auto"}, None), ({"precision": "tf32"}, TOGETHER),
    ],
)  # fmt: skip
def test_options(options, told):
    with torch.no_grad():
        _, report = rewritten(dyadic(OnSpikes()), images(4, 8), **{"neurons": "fuse", **options})
    sites = [one for one in report.sites if one.rule == RULE]
    assert [told in one.reason for one in sites] == ([True] if told else []) if told else not sites


def test_layers_that_are_trained_stay_apart():
    _, report = rewritten(dyadic(OnSpikes()), images(4, 8), neurons="fuse")
    assert not [one for one in report.sites if one.rule == RULE]


def test_a_card_decides_by_the_estimate():
    """Of an estimate alone, which need not be a GPU's here."""
    x = torch.rand(4, 8, 3, 32, 32).flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (4, 8))
    model = nn.Sequential(*block(3, 64, lif), *block(64, 128, lif), nn.Flatten(2), nn.Linear(131072, 16), lif())
    model = model.eval().to(memory_format=torch.channels_last)
    with torch.no_grad():
        report = sparsecomp.explain(model, x, device="h100", implementation="binary")
    judged = [one for one in report.sites if one.rule == RULE]
    assert len(judged) == 2 and all("apart" in one.reason for one in judged)
    assert all(one.rewritten == ("binary" not in one.reason and "fused estimated" not in one.reason) for one in judged)


def test_a_result_that_is_not_channels_last_stays_apart_on_a_card():
    model, x = OnSpikes().eval(), torch.rand(4, 8, 8, 32, 32)
    with torch.no_grad():
        report = sparsecomp.explain(model, x, device="h100", implementation="binary")
    assert "not channels-last" in site(report, RULE).reason


class Divides(nn.Module):
    """A layer on spikes, and neurons that integrate them with a leak or without."""

    def __init__(self, charge: str, tau: float) -> None:
        super().__init__()
        self.conv, self.charge, self.tau = nn.Conv2d(64, 64, 3, padding=1), charge, tau

    def forward(self, x: Tensor) -> Tensor:
        current = self.conv((x > 0.5).float().flatten(0, 1)).unflatten(0, x.shape[:2])
        neuron_of = (None, 0.0, None, None, None, None, 0.0, self.charge, self.tau, None, True, 1.0, 0.0)
        return sparsecomp.ops.lif(current, *neuron_of)[0]


def _site(**changes: Any) -> SiteInfo:
    made = SiteInfo(
        device="cuda", itemsize=4, n=128, c=64, size=(56, 56), k=64, window=Window.centred((1, 1), (1, 1)), groups=1,
        digits=3, density=None, active=None, tf32=False, channels_last=True, fused=True,
    )  # fmt: skip
    return made._replace(**changes)


def test_the_estimate_knows_what_one_launch_saves_and_costs():
    one = gate.decide(_site(), Behind(4))
    assert one.implementation == "fused"
    # three steps take the rows of four, and write the spikes of a step less
    three = gate.decide(_site(n=96), Behind(3))
    written = 32 * 64 * 56 * 56 / (0.83 * H100.bandwidth)
    assert one.seconds["fused"] - three.seconds["fused"] == pytest.approx(written, rel=0.01)
    assert three.seconds["dense"] < one.seconds["dense"]
    # where the host is what takes the time, a launch less is a gain
    hosted = gate.decide(_site(n=4, size=(7, 7), hosted=True), Behind(4))
    assert hosted.implementation == "fused"


def test_a_division_in_each_step_counts():
    """By two it is a product with a half; integrating without a leak, and by a rate that is trained, takes none."""
    taken, x = {}, torch.ones(32, 64, 32, 32).contiguous(memory_format=torch.channels_last).unflatten(0, (4, 8))
    for charge, tau in (("lif", 2.0), ("lif", 3.0), ("if", 3.0)):
        with torch.no_grad():
            report = sparsecomp.explain(Divides(charge, tau).eval(), x, device="h100", mode="reduce-overhead")
        taken[charge, tau] = site(report, "spike_conv").reason, site(report, RULE).reason
    assert taken["lif", 2.0] == taken["if", 3.0]
    assert all(one != other for one, other in zip(taken["lif", 2.0], taken["lif", 3.0], strict=True))
    by_product, by_division = (gate.decide(_site(), Behind(4, divides=one)).seconds for one in (False, True))
    assert by_product["fused"] < by_division["fused"] and by_product["dense"] == by_division["dense"]


@pytest.mark.parametrize("disable", [(), (RULE,)])
def test_a_small_layer_pays_with_its_neurons_where_the_host_launches(disable):
    """Dense, it would be a call of the host's less than ours; but the neurons are one more."""
    x = torch.rand(4, 2, 16, 14, 14).flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (4, 2))
    model = OnSpikes(made=nn.Conv2d(16, 16, 3, padding=1)).eval()
    with torch.no_grad():
        report = sparsecomp.explain(model, x, device="h100", options={"disable": disable})
    judged = site(report, "spike_conv")
    assert judged.rewritten == (not disable)
    assert judged.reason.endswith("with the neurons behind it") == (not disable)
    assert bool([one for one in report.sites if one.rule == RULE and one.rewritten]) == (not disable)


def test_only_a_layer_that_can_be_fused_counts_its_neurons():
    x = torch.rand(4, 2, 8, 14, 14).flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (4, 2))
    for model in (Kept("given"), Transposed(), OnSpikes(lambda y: y + 1)):
        with torch.no_grad():
            report = sparsecomp.explain(model.eval(), x, device="h100")
        assert not site(report, "spike_conv").rewritten


def test_the_decision_with_neurons_takes_the_better_of_one_launch_and_two():
    layer = Decision("dense", "", {"dense": 20e-6, "binary": 40e-6, "skip": 19e-6}, "measured")
    found = gate.with_neurons(layer, _site(), Behind(4))
    neurons = found.seconds["dense"] - 20e-6
    assert neurons > 5e-6
    assert found.seconds["skip"] == pytest.approx(19e-6 + neurons)
    fused = gate.decide(_site(), Behind(4)).seconds["fused"]
    assert found.seconds["binary"] == pytest.approx(min(40e-6 + neurons, fused))
    assert gate.with_neurons(Decision("dense", "no card"), _site(), Behind(4)) == Decision("dense", "no card")


class Shortcut(nn.Module):
    """A network of MS-ResNet's blocks (Hu et al. 2021, arXiv:2112.08954): neurons, layer, batch-norm, and a sum."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(*block(3, 16, lif)[:2])
        self.blocks = nn.ModuleList(
            nn.Sequential(make(), *block(16, 16, make), *block(16, 16, make)[:2]) for _ in range(2)
        )
        self.last = make()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for one in self.blocks:
            x = x + one(x)
        return self.last(x), x


def shortcuts(make: Callable[[], nn.Module] = lif) -> nn.Module:
    """Such a network, whose batch-norms are a product with a power of two and a sum: every way rounds them alike."""
    model = lively(Shortcut(make), images())
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = 0.125
            nn.init.zeros_(norm.running_mean), nn.init.constant_(norm.running_var, 0.125)
    return model


SHORTCUTS = "; what the neurons are given is written for others, too"


@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_sums_that_shortcuts_read_are_written(make):
    x = images()
    eager, apart, model = (shortcuts(make) for _ in range(3))
    with torch.no_grad():
        for _ in range(2):
            expected, _ = rewritten(apart, x, neurons="fuse", disable=(RULE,))
            found, report = rewritten(model, x, neurons="fuse", strict=True)
            assert 0.02 < expected[0].mean() < 0.98
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            torch.testing.assert_close(found, eager(x), rtol=0, atol=0)
            torch.testing.assert_close(model.last.v, apart.last.v, rtol=0, atol=0)
    fused = [one.reason.endswith(SHORTCUTS) for one in report.sites if one.rule == RULE and one.rewritten]
    assert fused == [False, True, False, True]


@pytest.mark.slow(reason="the interpreter runs whole networks")
@pytest.mark.parametrize("half", [False, True])
def test_sums_that_shortcuts_read_are_those_of_the_launches_apart(half):
    """In half precision spikingjelly's neurons are loops, and the described ones take their place."""
    x, found = images(), []
    x = x.half() if half else x
    for disable in ((), (RULE,)):
        model = shortcuts()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 50)
            result, report = by_kernels(model.half() if half else model, x, disable=disable)
        found.append(result)
        judged = [one for one in report.sites if one.rule == RULE and one.reason.endswith(SHORTCUTS)]
        assert len(judged) == (0 if disable else 2)
    assert 0.02 < found[0][0].float().mean() < 0.98
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("half", [False, True])
def test_on_a_card_sums_that_shortcuts_read_are_those_of_the_launches_apart(half, mode):
    x, found = images().cuda(), []
    x = x.half() if half else x
    for disable in ((), (RULE,)):
        torch._dynamo.reset()
        model = shortcuts().cuda().to(memory_format=torch.channels_last)
        model = model.half() if half else model
        options = {"implementation": "binary", "neurons": "fuse", "mode": mode, "disable": disable}
        compiled, results = torch.compile(model, backend="sparsecomp", options=options), []
        with torch.no_grad():
            for scale in (1.0, 1.0, 0.75):  # the last one replays
                functional.reset_net(model)
                results.append([one.clone() for one in compiled(scale * x)])
        report = sparsecomp.last_report()
        assert report is not None
        judged = [one for one in report.sites if one.rule == RULE and one.reason.endswith(SHORTCUTS)]
        assert len(judged) == (0 if disable else 2)
        found.append(results)
    for ours, apart in zip(*found, strict=True):
        assert 0.005 < ours[0].float().mean() < 0.98
        torch.testing.assert_close(ours, apart, rtol=0, atol=0)
