"""A batch-norm in training in front of a neuron of spikingjelly's is part of the neuron's step."""

import copy
from collections.abc import Callable

import pytest
import torch
from test_train_neurons import NEURONS, Operator, through_aot
from torch import Tensor, nn

from sparsecomp.report import Site

neuron, layer, functional = (
    pytest.importorskip(f"spikingjelly.activation_based.{name}") for name in ("neuron", "layer", "functional")
)
pytest.importorskip("spikingjelly._ops.lif")

pytestmark = pytest.mark.quick_cases(2)


def images(steps: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return 2 * torch.randn(steps, 2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(dtype) + 0.5


class Normed(nn.Module):
    def __init__(self, norm: nn.Module, name: str = "lif") -> None:
        super().__init__()
        self.norm, self.fire = norm, NEURONS[name]()

    def forward(self, x: Tensor) -> Tensor:
        return self.fire(self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


def drawn(norm: nn.Module) -> nn.Module:
    """With a weight and a bias that are not all the same."""
    for one, start in zip(norm.parameters(), (0.5, -0.3), strict=False):
        nn.init.constant_(one, start).data.add_(torch.linspace(0, 1, one.numel()))
    return norm


def steps_of(call: Callable[..., Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Spikes, gradients and statistics of two steps."""
    found = []
    for scale in (1.0, 0.7):
        given = (x * scale).requires_grad_()
        spikes = call(given)
        weights = torch.linspace(-1, 1, spikes.numel()).view(spikes.shape)
        found += [spikes.detach(), *torch.autograd.grad((spikes * weights).sum(), [given, *module.parameters()])]
        functional.reset_net(module)
    return [*found, *(one.clone() for one in module.buffers())]


def becomes_part(module: nn.Module, x: Tensor, part: bool = True, **tolerance: float) -> Site:
    eager = copy.deepcopy(module)
    expected = steps_of(eager, eager, x)
    compiled, reports, _ = through_aot(module)
    found = steps_of(compiled, module, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **({"rtol": 1e-4, "atol": 2e-5} | tolerance))
    assert expected[0].any()
    sites = [one for report in reports for one in report.sites if one.rule == "train_neurons"]
    assert all(one.rewritten and ("with the batch-norm" in one.reason) == part for one in sites) and sites
    return sites[0]


@pytest.mark.parametrize("name", NEURONS)
def test_every_neuron(name: str) -> None:
    becomes_part(Normed(drawn(nn.BatchNorm2d(3)), name), images())


NORMS: dict[str, Callable[[], nn.Module]] = {
    "without weights": lambda: nn.BatchNorm2d(3, affine=False),
    "without statistics": lambda: drawn(nn.BatchNorm2d(3, track_running_stats=False)),
    "of a large mean": lambda: drawn(nn.BatchNorm2d(3, momentum=0.3, eps=0.1)),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_norm(name: str) -> None:
    becomes_part(Normed(NORMS[name]()), images() + 30 * (name == "of a large mean"), atol=2e-4)


def test_nothing_of_the_forward_is_computed_of_a_factor_that_is_handed_on() -> None:
    """Of a kernel that sums and then writes both, Triton 3.6 makes none."""
    module = Normed(drawn(nn.BatchNorm2d(3)))
    compiled, _, forwards = through_aot(module)
    compiled(images())
    (made,) = forwards[0].graph.find_nodes(op="call_function", target=torch.ops.sparsecomp.trained_neuron.default)
    _, factor, _ = made.args[3]
    assert {*factor.users} <= {made, forwards[0].graph.output_node()}


def test_layers_of_the_library() -> None:
    module = nn.Sequential(
        layer.Conv2d(3, 4, 3, step_mode="m"), layer.BatchNorm2d(4, step_mode="m"), neuron.IFNode(step_mode="m")
    )
    becomes_part(module, images())


class Twice(Normed):
    """The same batch-norm before two neurons."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x) + 0.1 * x)


class Read(Normed):
    """Somebody else reads what the batch-norm gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.fire(y) + y


def test_one_batch_norm_of_two_neurons_moves_its_statistics_twice() -> None:
    """Its gradient cannot be had in eager mode: the second call writes to statistics that the first has kept."""
    module, x = Twice(drawn(nn.BatchNorm2d(3))), images()
    eager = copy.deepcopy(module)
    compiled, reports, _ = through_aot(module)
    torch.testing.assert_close(compiled(x), eager(x))
    for ours, theirs in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [one.rewritten for one in reports[0].sites if one.rule == "train_neurons"] == [True, True]


def test_what_is_read_elsewhere_stays() -> None:
    becomes_part(Read(drawn(nn.BatchNorm2d(3))), images(), part=False)


class Detached(Normed):
    """What the neuron gives has no gradient for the batch-norm, or the batch-norm none for what is before it."""

    def __init__(self, norm: nn.Module, how: str) -> None:
        super().__init__(norm)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.how != "without gradients"):
            y = self.norm(x.flatten(0, 1))
        if self.how == "detached":
            y = y.detach()
        with torch.set_grad_enabled(self.how != "viewed without gradients"):
            y = y.unflatten(0, x.shape[:2])
        # each has a gradient, which is zero
        return self.fire(y) + 0 * (x + sum(one.sum() for one in self.norm.parameters()))


@pytest.mark.parametrize("how", ["detached", "viewed without gradients", "without gradients"])
def test_gradients_that_stop_between_them_stay_stopped(how: str) -> None:
    module, x = Detached(drawn(nn.BatchNorm2d(3)), how), images()
    becomes_part(module, x, part=False)
    found = steps_of(through_aot(module)[0], module, x)
    assert not any(one.any() for one in found[1:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Spikes next to a threshold may differ: torch normalises in half precision in another order."""
    module = Normed(drawn(nn.BatchNorm2d(3)))
    module.fire = Operator()
    compiled, reports, _ = through_aot(module)
    x = images(dtype=dtype)
    ours, theirs = compiled(x), copy.deepcopy(module)(x)
    assert ours.dtype is dtype and theirs.any() and (ours != theirs).float().mean() < 0.02
    (site,) = [one for one in reports[0].sites if one.rule == "train_neurons"]
    assert "with the batch-norm" in site.reason


@pytest.mark.parametrize("between", [True, False])
def test_a_bias_that_is_written_to_stays_with_its_batch_norm(between: bool) -> None:
    class Moving(Normed):
        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            found = None if between else self.fire(normed)
            self.norm.bias.detach().add_(3.0)
            return self.fire(normed) if found is None else found

    module = Moving(drawn(nn.BatchNorm2d(3)))
    eager = copy.deepcopy(module)
    compiled, reports, _ = through_aot(module)
    assert torch.equal(compiled(images()), eager(images()))
    assert torch.equal(module.norm.bias, eager.norm.bias)
    (site,) = [one for report in reports for one in report.sites if one.rule == "train_neurons"]
    assert site.rewritten and "with the batch-norm" not in site.reason
