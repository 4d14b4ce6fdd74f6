"""Every optimizer of torch on the values of a sparse layer, before and after its pattern changes, beside one on a plain
vector whose elements are looked up by their positions."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsecomp.formats import CSC, CSR, Pattern
from sparsecomp.nn import SparseLinear
from sparsecomp.runtime import PatternManager

SHAPE = (5, 6)
KINDS = [
    kind for name in torch.optim.__all__
    if isinstance(kind := getattr(torch.optim, name), type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]  # fmt: skip
"""All but LBFGS, which is refused, SparseAdam, which takes sparse gradients, and Muon, which takes matrices."""
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def cases(*ways: str) -> Any:
    found = [
        (kind, way) for kind in KINDS for way in ways
        if way == "plain" or (way != "fused" or kind.__name__ in FUSED) and way in inspect.signature(kind).parameters
    ]  # fmt: skip
    return pytest.mark.parametrize(("kind", "way"), found, ids=[f"{kind.__name__}-{way}" for kind, way in found])


def signal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positions(seed: int) -> list[tuple[int, int]]:
    """Twelve, by rows."""
    keys = torch.randperm(SHAPE[0] * SHAPE[1], generator=torch.Generator().manual_seed(seed))[:12].sort().values
    return [divmod(key, SHAPE[1]) for key in keys.tolist()]


def pattern_of(places: list[tuple[int, int]]) -> Pattern:
    row, col = torch.tensor(places).T
    return Pattern.from_positions(row, col, SHAPE)


def options(kind: type, way: str) -> dict[str, Any]:
    extra = {"momentum": 0.9} if "momentum" in inspect.signature(kind).parameters else {}
    extra |= {"initial_accumulator_value": 0.3} if kind is torch.optim.Adagrad else {}
    return {"lr": 0.02} | extra | ({} if way == "plain" else {way: True})


class Vector:
    """The same weights as one vector in the order of positions, which a new one takes the place of at a change."""

    def __init__(self, dense: torch.Tensor, places: list[tuple[int, int]], kind: type, clip: bool) -> None:
        self.places, self.kind, self.clip = places, kind, clip
        self.values = nn.Parameter(torch.stack([dense[place] for place in places]))
        self.optimizer = kind([self.values], **options(kind, "plain"))

    def dense(self, values: torch.Tensor) -> torch.Tensor:
        row, col = torch.tensor(self.places).T
        return torch.zeros(SHAPE, dtype=torch.float64).index_put((row, col), values)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (x @ self.dense(self.values).T).square().sum().backward()
        if self.clip:
            nn.utils.clip_grad_norm_([self.values], 0.7)
        self.optimizer.step()

    def become(self, places: list[tuple[int, int]]) -> None:
        old, state = dict(zip(self.places, range(len(self.places)), strict=True)), self.optimizer.state[self.values]
        fresh = {"step_size": 0.02} if self.kind is torch.optim.Rprop else {}
        fresh |= {"sum": 0.3} if self.kind is torch.optim.Adagrad else {}

        def moved(numbers: torch.Tensor, start: float) -> torch.Tensor:
            return torch.tensor([float(numbers[old[one]]) if one in old else start for one in places]).double()

        values = nn.Parameter(moved(self.values.detach(), 0.0))
        sized = {name: one for name, one in state.items() if torch.is_tensor(one) and one.shape == self.values.shape}
        moved_state = dict(state) | {name: moved(one, fresh.get(name, 0.0)) for name, one in sized.items()}
        self.places, self.values = places, values
        self.optimizer = self.kind([values], **options(self.kind, "plain"))
        self.optimizer.state[values] = moved_state


def trained(kind: type, way: str, format: Any, device: str = "cpu", clip: bool = False) -> None:
    """Steps, a change to as many others, and steps again, beside the vector."""
    first, second = positions(1), positions(2)
    assert set(first) & set(second) and set(first) != set(second)
    dense = signal(*SHAPE, seed=3)
    vector = Vector(dense, first, kind, clip)
    layer = SparseLinear(format.from_dense(dense * pattern_of(first).mask())).to(device)
    optimizer = kind(layer.parameters(), **options(kind, way))
    manager = PatternManager(layer, [optimizer])
    for step in range(6):
        if step == 3:
            manager.become(pattern_of(second).to(device))
            vector.become(second)
        x = signal(4, 6, seed=step + 10)
        vector.step(x)
        optimizer.zero_grad()
        layer(x.to(device)).square().sum().backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.7)
            assert float(norm) > 0.7
        optimizer.step()
    found = layer.weight.matrix.to_dense().detach().cpu()
    near = {"rtol": 1e-3, "atol": 1e-5} if way == "capturable" else {}  # steps are float32 numbers of the device then
    torch.testing.assert_close(found, vector.dense(vector.values.detach()), **near)
    assert (found != dense * pattern_of(first).mask()).any()


@cases("plain", "foreach", "fused")
def test_trains_as_a_vector(kind, way):
    trained(kind, way, CSR)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@cases("plain", "foreach", "fused", "capturable")
@pytest.mark.parametrize("format", [CSR, CSC], ids=["CSR", "CSC"])
def test_trains_as_a_vector_on_a_gpu(kind, way, format):
    if (kind, way) == (torch.optim.Adagrad, "fused"):
        pytest.skip("torch has a fused Adagrad for a CPU alone")
    trained(kind, way, format, "cuda")


@pytest.mark.parametrize("way", ["plain", "foreach"])
def test_gradients_are_clipped_by_the_norm_of_what_is_stored(way):
    trained(torch.optim.AdamW, way, CSC, clip=True)


def test_a_scaler_scales_and_skips_around_a_change():
    """A step with an infinite gradient is skipped, in which the pattern may change all the same."""
    def run(scaled: bool) -> tuple[torch.Tensor, float]:
        layer = SparseLinear(CSR.from_dense(signal(*SHAPE, seed=3).float() * pattern_of(positions(1)).mask()))
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02)
        manager = PatternManager(layer, [optimizer])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(layer(signal(4, 6, seed=step).float()).square().sum()).backward()
            if step == 3:
                manager.become(pattern_of(positions(2)))
                if not scaled:
                    continue
                layer.values.grad[0] = torch.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(layer.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return layer.weight.matrix.to_dense().detach(), scaler.get_scale()

    (plain, _), (scaled, scale) = run(False), run(True)
    torch.testing.assert_close(scaled, plain)
    assert scale == 512.0  # the skipped step halves it


def test_an_average_follows_where_its_layer_changes_alike():
    layer = SparseLinear(CSR.from_dense(signal(*SHAPE, seed=3) * pattern_of(positions(1)).mask()))
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    managers = PatternManager(layer, [optimizer]), PatternManager(average.module)
    expected = layer.weight.matrix.to_dense().detach()
    for step in range(4):
        if step == 2:
            new = pattern_of(positions(2))
            for manager in managers:
                manager.become(new)
            expected = expected * new.mask()
        optimizer.zero_grad()
        layer(signal(4, 6, seed=step)).square().sum().backward()
        optimizer.step()
        average.update_parameters(layer)
        now = layer.weight.matrix.to_dense().detach()
        expected = now if step == 0 else 0.9 * expected + 0.1 * now  # torch's first update copies
    torch.testing.assert_close(average.module.weight.matrix.to_dense().detach(), expected)
