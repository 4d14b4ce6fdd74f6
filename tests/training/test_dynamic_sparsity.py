"""RigL and SET beside dense references written from the papers; patterns that change under optimizers and graphs."""

import copy
import gc
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from interrupted import gone_on
from torch import nn

import sparsecomp
from sparsecomp.errors import ConfigError, PatternError
from sparsecomp.formats import BSR, COO, CSC, CSR, Pattern
from sparsecomp.nn import SparseLinear
from sparsecomp.training.dynamic.delta import PatternDelta
from sparsecomp.training.dynamic.dynamic_sparsity import DynamicSparsity
from sparsecomp.training.dynamic.gradients import GradientAccumulator
from sparsecomp.training.dynamic.manager import PatternManager
from sparsecomp.training.dynamic.random_growth import RandomGrowth
from sparsecomp.training.dynamic.rigl import RigL
from sparsecomp.training.dynamic.set import SET
from sparsecomp.training.dynamic.srigl import SRigL
from sparsecomp.training.dynamic.straight_through import sr_ste

FORMATS = pytest.mark.parametrize("format", [CSR, CSC], ids=lambda format: format.__name__)


def signal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(format=CSR, density: float = 0.3) -> nn.Sequential:
    """Two sparse layers and a dense one."""

    def layer(rows: int, cols: int, seed: int) -> SparseLinear:
        weight = signal(rows, cols, seed=seed)
        kept = torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed + 50)) < density
        return SparseLinear(format.from_dense(weight * kept), signal(rows, seed=seed + 90))

    torch.manual_seed(4)
    return nn.Sequential(layer(12, 9, 1), nn.Tanh(), layer(7, 12, 2), nn.Tanh(), nn.Linear(7, 3))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [layer.weight.matrix.to_dense().detach() for layer in model.modules() if isinstance(layer, SparseLinear)]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rule: DynamicSparsity, count: int, forward=None) -> None:
    for step in range(count):
        optimizer.zero_grad()
        with rule.watch():
            F.mse_loss((forward or model)(signal(16, 9, seed=step)), signal(16, 3, seed=step + 700)).backward()
        if not rule.update():
            optimizer.step()


class Dense:
    """Masked dense training by the paper's words: whole gradients, and slots reset where links are new."""

    def __init__(self, model: nn.Sequential, every: int, end: int, fraction: float) -> None:
        self.layers = [copy.deepcopy(one) for one in model]
        self.masks = {}
        for place, layer in enumerate(self.layers):
            if isinstance(layer, SparseLinear):
                weight = layer.weight.matrix.to_dense().detach()
                self.layers[place] = nn.Linear(*weight.shape[::-1])
                self.layers[place].weight.data, self.layers[place].bias.data = weight.clone(), layer.bias.data.clone()
                self.masks[place] = weight != 0
        self.model = nn.Sequential(*self.layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.every, self.end, self.fraction = every, end, fraction

    def run(self, count: int) -> None:
        for step in range(count):
            self.optimizer.zero_grad()
            F.mse_loss(self.model(signal(16, 9, seed=step)), signal(16, 3, seed=step + 700)).backward()
            if 0 < step < self.end and step % self.every == 0:
                self.change(step)
                continue
            for place, mask in self.masks.items():
                self.layers[place].weight.grad *= mask
            self.optimizer.step()

    def change(self, step: int) -> None:
        for place, mask in self.masks.items():
            weight = self.layers[place].weight
            share = self.fraction / 2 * (1 + math.cos(math.pi * step / self.end))
            count = int(share * int(mask.sum()))
            magnitudes = weight.detach().abs().masked_fill(~mask, math.inf).flatten()
            kept = mask.clone().flatten()
            kept[magnitudes.argsort()[:count]] = False
            gradient = weight.grad.abs().flatten().masked_fill(kept, -1)
            new = kept.clone()
            new[gradient.argsort(descending=True)[:count]] = True
            new = new.view_as(mask)
            weight.data *= new
            for slot in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[weight][slot] *= new & mask
            self.masks[place] = new


@FORMATS
def test_rigl_trains_as_its_dense_reference(format):
    model = network(format)
    dense = Dense(model, every=3, end=12, fraction=0.6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rigl = RigL(model, optimizer, every=3, end=12, fraction=0.6)
    stored = [weight.count_nonzero() for weight in weights(model)]
    steps(model, optimizer, rigl, 17)
    dense.run(17)
    for weight, place in zip(weights(model), dense.masks, strict=True):
        torch.testing.assert_close(weight, dense.layers[place].weight.detach(), rtol=1e-4, atol=1e-5)
    assert [layer.values.numel() for layer in model if isinstance(layer, SparseLinear)] == stored


def test_set_drops_of_both_signs_and_grows_anywhere():
    values = torch.tensor([0.1, -0.1, 0.2, -0.9, 3.0, -4.0, 0.3, 5.0, 6.0, 7.0])
    layer = SparseLinear(COO.from_triplets(torch.arange(10), torch.arange(10) % 5, values, (10, 5)).to(CSR))
    rule = SET(layer, torch.optim.SGD(layer.parameters()), end=10, every=1, fraction=0.4)
    # four of ten: of three negative ones one goes, of seven others three
    assert rule.kept(values, 4).tolist() == [False, False, False, True, True, True, False, True, True, True]
    for _ in range(2):
        rule.update()
    now = layer.weight.matrix.to_dense()
    assert {3.0, -4.0, 5.0, 6.0, 7.0, -0.9} == {round(v, 4) for v in now[now != 0].tolist()}
    assert layer.values.numel() == 10
    seen = torch.zeros(10, 5)
    for seed in range(300):
        rule.seed = seed
        seen += rule.grown("", Pattern.of(now), Pattern.of(now), 4).mask()
    assert not seen[now != 0].any() and seen.sum() == 1200
    # each of 44 free places is drawn 300 * 4 / 44 = 27 times; five deviations of a binomial
    assert (seen[now == 0] - 1200 / 44).abs().max() < 5 * math.sqrt(1200 / 44)


def test_random_growth_drops_the_least_magnitudes_by_the_cosine():
    values = torch.tensor([0.5, -0.1, 0.3, -0.9, math.nan, -0.1, 2.0, 3.0])
    layer = SparseLinear(COO.from_triplets(torch.arange(8), torch.arange(8) % 5, values, (8, 5)).to(CSR))
    rule = RandomGrowth(layer, torch.optim.SGD(layer.parameters()), end=4, every=1, fraction=0.5)
    # at the half of the way a quarter goes, of equal ones the last
    rule.steps = 2
    assert rule.share == pytest.approx(0.25)
    assert rule.kept(values, 2).tolist() == [True, False, True, True, True, False, True, True]
    assert rule.kept(values, 1).tolist() == [True, True, True, True, True, False, True, True]
    old = rule.managers[""].pattern
    assert rule.update() and layer.values.numel() == 8
    new = rule.managers[""].pattern
    assert (new - old).nnz == 2 and (old - new).keys.tolist() == [1 * 5 + 1, 5 * 5 + 0]
    for weight in (torch.zeros(3, 4), torch.ones(3, 4)):
        layer = SparseLinear(CSR.from_dense(weight))
        rule = RandomGrowth(layer, torch.optim.SGD(layer.parameters()), end=4, every=1, fraction=1.0)
        assert [rule.update() for _ in range(3)] == [False, True, True] and layer.values.equal(weight[weight != 0])


def test_set_leaves_a_full_layer_and_replaces_no_more_than_there_is_room_for():
    weight = signal(5, 4)
    weight[0, :3] = 0
    for rows, changed in ((weight, 3), (weight[1:], 0)):
        layer = SparseLinear(CSR.from_dense(rows))
        rule = SET(layer, torch.optim.SGD(layer.parameters()), end=10, every=1, fraction=0.9)
        for _ in range(2):
            rule.update()
        assert (layer.weight.matrix.to_dense() != rows).sum() == changed
        assert layer.values.numel() == rows.count_nonzero()
        assert (Pattern.of(layer.weight) - Pattern.of(rows)).nnz == changed


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("rule", [RigL, SET, RandomGrowth, SRigL])
def test_layers_that_store_nothing_or_all_train_on_and_keep_their_number(rule, fraction):
    one_row = torch.cat([signal(1, 6), torch.zeros(3, 6)])
    for weight in (torch.zeros(4, 6), signal(4, 6), one_row):
        layer = SparseLinear(CSR.from_dense(weight))
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        change = rule(layer, optimizer, end=10, every=2, fraction=fraction)
        for step in range(4):
            optimizer.zero_grad()
            with change.watch():
                layer(signal(5, 6, seed=step)).square().sum().backward()
            if not change.update():
                optimizer.step()
        found = layer.weight.matrix
        found.validate()
        assert found.nnz == weight.count_nonzero() and found.values.isfinite().all()


@pytest.mark.slow(reason="compiled by Inductor")
@pytest.mark.parametrize("rule", [RigL, SET])
def test_no_change_of_a_pattern_compiles_again(rule):
    torch._dynamo.reset()
    model = network()
    reference, compiled = copy.deepcopy(model), torch.compile(model, backend="sparsecomp")
    compilations = []
    torch._dynamo.callback.on_compile_start(lambda *_: compilations.append(1))
    try:
        for forward, module in ((compiled, model), (reference, reference)):
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
            changing = rule(module, optimizer, every=3, end=20, fraction=0.5)
            steps(module, optimizer, changing, 5, forward)
            before = len(compilations)
            steps(module, optimizer, changing, 10, forward)
            assert len(compilations) == before
    finally:
        torch._dynamo.reset()
        torch._dynamo.callback.callback_handler.clear()
    assert compilations and changing.steps == 15
    for one, other in zip(weights(model), weights(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_run_that_goes_on_has_the_same_bits():
    def run(interrupted: bool) -> list[torch.Tensor]:
        model, rule_of = network(), partial(RigL, every=2, end=20, fraction=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rule = rule_of(model, optimizer)
        steps(model, optimizer, rule, 7)
        if interrupted:
            model, optimizer, rule = gone_on(model, optimizer, rule, network(density=0.5), rule_of)
        steps(model, optimizer, rule, 6)
        return weights(model)

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)


# ---- the manager ----------------------------------------------------------------------------------------------------


def pattern_of(*positions: tuple[int, int], shape=(3, 4)) -> Pattern:
    row, col = torch.tensor(positions or [(0, 0)]).T
    found = Pattern.from_positions(row, col, shape)
    return found if positions else found - found


def layer_of(format=CSR) -> SparseLinear:
    dense = torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 4]])
    return SparseLinear(format.from_dense(dense), torch.zeros(3))


@FORMATS
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_values_gradients_and_state_follow_by_position(format, kind):
    layer = layer_of(format)
    optimizer = kind(layer.parameters(), lr=0.07, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    layer(torch.ones(1, 4)).pow(2).sum().backward()
    optimizer.step()
    manager = PatternManager(layer, [optimizer])

    def dense_of(numbers: torch.Tensor) -> torch.Tensor:
        return layer.weight.matrix.with_values(numbers.detach()).to_dense()

    slots = {name: slot for name, slot in optimizer.state[layer.values].items() if slot.shape == layer.values.shape}
    before = {"values": dense_of(layer.values), "grad": dense_of(layer.values.grad)}
    before |= {name: dense_of(slot) for name, slot in slots.items()}
    manager.queue(PatternDelta(pattern_of((1, 1), (0, 3), (2, 2)), pattern_of((0, 2))))
    manager.apply(lambda count: torch.full((count,), 9.0))
    expected = before["values"].clone()
    expected[0, 2], expected[1, 1], expected[0, 3], expected[2, 2] = 0, 9, 9, 9
    assert torch.equal(layer.weight.matrix.to_dense(), expected)
    after = {name: dense_of(optimizer.state[layer.values][name]) for name in slots}
    after["grad"] = dense_of(layer.values.grad)
    for name, found in after.items():
        expected = before[name].clone()
        expected[0, 2] = 0
        assert torch.equal(found, expected), name
    assert slots
    optimizer.zero_grad()
    layer(torch.ones(1, 4)).sum().backward()  # by six elements, through the transposed arrays too
    assert layer.values.grad.tolist() == [1.0] * 6
    optimizer.step()
    manager.undo()
    assert manager.pattern == Pattern.of(before["values"]) and not manager.history
    assert layer.weight.matrix.to_dense()[0, 2] == before["values"][0, 2]


def test_a_queue_is_one_change():
    layer = layer_of()
    manager = PatternManager(layer)
    manager.queue(PatternDelta(pattern_of(), pattern_of((0, 0), (2, 1))))
    manager.queue(PatternDelta(pattern_of((2, 1), (1, 0)), pattern_of()))
    manager.apply()
    assert layer.weight.matrix.to_dense().tolist() == [[0, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 4]]
    assert manager.pattern == pattern_of((0, 2), (1, 0), (2, 1), (2, 3)) and len(manager.history) == 1
    memory = layer.values.data_ptr(), layer.indices.data_ptr(), layer.pointers.data_ptr()
    manager.queue(PatternDelta(pattern_of((0, 0)), pattern_of((0, 2))))
    manager.apply()
    assert memory == (layer.values.data_ptr(), layer.indices.data_ptr(), layer.pointers.data_ptr())


def test_refused_changes_leave_all_as_it_was():
    layer = layer_of()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for policy, delta in (
        ("static", PatternDelta(pattern_of((1, 1)), pattern_of())),
        ("grow", PatternDelta(pattern_of((1, 1)), pattern_of((0, 0)))),
        ("shrink", PatternDelta(pattern_of((1, 1)), pattern_of())),
    ):
        with pytest.raises(PatternError, match=f"the pattern is {policy}"):
            PatternManager(layer, policy=policy).queue(delta)
    for policy, new in (("static", pattern_of((1, 1))), ("grow", pattern_of((0, 0))), ("shrink", pattern_of((1, 1)))):
        with pytest.raises(PatternError, match=f"the pattern is {policy}"):
            PatternManager(layer, policy=policy).become(new)
    with pytest.raises(PatternError, match="one shape and one device"):
        PatternManager(layer, keep=0).become(pattern_of((1, 1), shape=(2, 4)))
    manager = PatternManager(layer)
    for delta, message in (
        (PatternDelta(pattern_of((0, 0)), pattern_of()), "1 of 1 additions are stored already"),
        (PatternDelta(pattern_of(), pattern_of((1, 1))), "1 of 1 removals are not stored"),
        (PatternDelta(pattern_of((0, 0), shape=(2, 4)), pattern_of(shape=(2, 4))), "one shape and one device"),
    ):
        manager.queue(delta)
        with pytest.raises(PatternError, match=message):
            manager.apply()
    manager.queue(PatternDelta(pattern_of((1, 1)), pattern_of()))
    with pytest.raises(PatternError, match=r"start gave values \(3,\), needs \(1,\)"):
        manager.apply(lambda count: torch.ones(count + 2))

    def within(_gradient: torch.Tensor) -> None:
        manager.queue(PatternDelta(pattern_of((1, 1)), pattern_of()))
        manager.apply()

    out = layer(torch.ones(1, 4))
    out.register_hook(within)
    with pytest.raises(PatternError, match="within a backward"):
        out.sum().backward()
    with pytest.raises(PatternError, match="no change to take back"):
        manager.undo()
    with pytest.raises(PatternError, match="adds and removes the same"):
        PatternDelta(pattern_of((1, 1)), pattern_of((1, 1)))
    with pytest.raises(PatternError, match="policy is 'none'"):
        PatternManager(layer, policy="none")
    with pytest.raises(PatternError, match="in BSR"):
        PatternManager(SparseLinear(BSR.from_dense(torch.ones(4, 4), block=(2, 2))))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rule", [RigL, SET])
def test_a_change_while_a_graph_is_captured_is_refused_and_the_graph_is_whole(rule):
    layer, x = layer_of().to("cuda"), torch.ones(1, 4, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    manager, changes = PatternManager(layer, [optimizer]), rule(layer, optimizer, end=9, every=1, fraction=0.5)
    manager.become(manager.pattern | pattern_of((1, 1)).to("cuda"))
    changes.update()  # step 0 changes nothing
    with changes.watch():
        layer(x).sum().backward()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    manager.queue(PatternDelta(pattern_of((2, 1)).to("cuda"), pattern_of().to("cuda")))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for change in (manager.apply, lambda: manager.become(pattern_of().to("cuda")), manager.undo, changes.update):
            with pytest.raises(PatternError, match="while a CUDA graph is captured"):
                change()
        out = layer(x)
    graph.replay()
    torch.testing.assert_close(out, layer(x))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_change_between_forward_and_backward_is_an_error_of_autograd():
    layer = layer_of()
    loss = layer(torch.ones(1, 4, requires_grad=True)).pow(2).sum()
    manager = PatternManager(layer)
    manager.queue(PatternDelta(pattern_of((0, 1)), pattern_of((0, 0))))
    manager.apply()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@FORMATS
def test_more_and_fewer_elements_train_as_dense_while_an_earlier_loss_is_held(format):
    layer, kept = network(format)[0].double(), []
    dense, bias = (one.detach().clone().requires_grad_() for one in (layer.weight.matrix.to_dense(), layer.bias))
    optimizer, other = (torch.optim.Adam(one, lr=0.01) for one in (layer.parameters(), [dense, bias]))
    manager, mask = PatternManager(layer, [optimizer]), Pattern.of(layer.weight).mask()
    for step in range(4):
        x = signal(6, 9, seed=step).double()
        optimizer.zero_grad(), other.zero_grad()
        kept.append(layer(x).pow(2).sum())
        kept[-1].backward()
        F.linear(x, dense * mask, bias).pow(2).sum().backward()
        optimizer.step(), other.step()
        torch.testing.assert_close(layer.weight.matrix.to_dense(), dense * mask, rtol=1e-9, atol=1e-12)
        new = Pattern.of(signal(12, 9, seed=step + 30).abs() > (0.3, 1.5)[step % 2])
        manager.queue(PatternDelta.between(manager.pattern, new))
        manager.apply()
        mask, before = new.mask(), mask
        with torch.no_grad():
            for one in (dense, *(other.state[dense][slot] for slot in ("exp_avg", "exp_avg_sq"))):
                one.mul_(mask & before)


@FORMATS
@pytest.mark.parametrize("by_load", [True, False])
def test_a_layer_with_frozen_values_gives_the_gradient_by_its_input_through_the_new_pattern(format, by_load):
    layer = network(format)[0]
    other = SparseLinear(format.from_dense(signal(12, 9, seed=8) * (signal(12, 9, seed=9) > 0)), layer.bias)
    layer.requires_grad_(False)
    if by_load:
        layer.load_state_dict(other.state_dict())
    else:
        manager = PatternManager(layer)
        manager.queue(PatternDelta.between(manager.pattern, Pattern.of(other.weight)))
        manager.apply(lambda count: torch.ones(count))
    x = signal(5, 9).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.matrix.to_dense().sum(0).expand(5, 9))


def test_a_change_within_inference_mode_leaves_a_layer_that_trains():
    layer = layer_of()
    manager = PatternManager(layer)
    with torch.inference_mode():
        manager.queue(PatternDelta.between(manager.pattern, Pattern.of(torch.eye(3, 4))))
        manager.apply(lambda count: torch.ones(count))
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.values.grad.tolist() == [1, 1, 1]


def test_what_no_pattern_follows_is_refused():
    layer = layer_of()
    with pytest.raises(PatternError, match="LBFGS keeps all parameters in one vector"):
        PatternManager(layer, [torch.optim.LBFGS(layer.parameters())])
    nn.utils.parametrize.register_parametrization(layer, "values", nn.Tanh())
    manager, before = PatternManager(layer), layer.weight.matrix.to_dense()
    manager.queue(PatternDelta.between(manager.pattern, Pattern.of(torch.eye(3, 4))))
    with pytest.raises(PatternError, match="values are computed"):
        manager.apply()
    assert torch.equal(layer.weight.matrix.to_dense(), before)
    one, other = layer_of(), layer_of()
    other.values = one.values
    model = nn.ModuleList([one, other])
    with pytest.raises(ConfigError, match="values of 0, 1 are another module's too"):
        SET(model, torch.optim.SGD(model.parameters()), end=10)


# ---- gradients of what is not stored --------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 5, 2**20])
def test_candidates_are_the_largest_of_the_dense_gradient(at_once, monkeypatch):
    monkeypatch.setattr("sparsecomp.training.dynamic.gradients.AT_ONCE", at_once)
    layer, xs = layer_of(), [signal(2, 5, 4), signal(2, 5, 4, seed=1)]
    dense = layer.weight.matrix.to_dense().detach().requires_grad_()
    seen = GradientAccumulator(layer)
    for x in xs:
        with seen.watching():
            layer(x).pow(3).sum().backward()
        F.linear(x, dense).pow(3).sum().backward()
    layer(xs[0]).sum().backward()  # not watched
    kept = Pattern.of(layer.weight)
    scores = dense.grad.abs().masked_fill(kept.mask(), -1).flatten()
    for count in range(9):
        expected = scores.argsort(descending=True)[:count].sort().values
        assert seen.candidates(count, kept).keys.tolist() == expected.tolist()
    with pytest.raises(PatternError, match="9 elements were asked for, of 8"):
        seen.candidates(9, kept)
    seen.clear()
    with pytest.raises(PatternError, match="no backward reached the layer"):
        seen.candidates(1, kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_candidates_on_a_gpu_are_the_largest_of_the_dense_gradient_of_halves_too(dtype, monkeypatch):
    monkeypatch.setattr("sparsecomp.training.dynamic.gradients.AT_ONCE", 7 * 40)  # rows of several blocks
    generator = torch.Generator().manual_seed(0)
    # whole numbers, whose sums are exact, beyond what halves hold, and often equal
    x, gradient = (torch.randint(-60, 61, (50, size), generator=generator).double() for size in (40, 24))
    kept = Pattern.of((torch.rand(24, 40, generator=generator) < 0.3).float())
    seen = GradientAccumulator(nn.Linear(40, 24))
    seen.take(x.to("cuda", dtype), gradient.to("cuda", dtype))
    found = seen.candidates(100, kept.to("cuda"))
    scores = (gradient.mT @ x).abs().masked_fill(kept.mask(), -1).flatten()
    expected = scores.sort(descending=True, stable=True).indices[:100].sort().values
    assert found.keys.tolist() == expected.tolist()


def test_candidates_among_some_are_the_largest_of_the_dense_gradient_there():
    layer, xs = layer_of(), [signal(2, 5, 4), signal(2, 5, 4, seed=1)]
    dense = layer.weight.matrix.to_dense().detach().requires_grad_()
    seen = GradientAccumulator(layer)
    for x in xs:
        with seen.watching():
            layer(x).pow(3).sum().backward()
        F.linear(x, dense).pow(3).sum().backward()
    among = pattern_of((0, 1), (0, 3), (1, 2), (2, 0), (2, 2))
    scores = dense.grad.abs().masked_fill(~among.mask(), -1).flatten()
    for count in range(6):
        expected = scores.argsort(descending=True)[:count].sort().values
        assert seen.candidates_among(count, among).keys.tolist() == expected.tolist()
    with pytest.raises(PatternError, match="6 elements were asked for"):
        seen.candidates_among(6, among)
    seen.clear()
    with seen.watching():
        (layer(torch.ones(1, 4)) * torch.tensor([2.0, math.nan, 2.0])).sum().backward()
    found = seen.candidates_among(3, among)  # equal ones go to the lowest position, NaN is the least
    assert found.keys.tolist() == [1, 3, 8]


def test_rigl_looks_at_the_share_that_it_was_told():
    def trained(**settings) -> tuple[nn.Module, list[int]]:
        model, looked_at = network(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        rule = RigL(model, optimizer, end=12, every=3, fraction=0.6, **settings)
        for accumulator in rule.gradients.values():
            among = accumulator.candidates_among
            accumulator.candidates_among = lambda count, where, mean, among=among: (
                looked_at.append(where.nnz), among(count, where, mean))[1]  # fmt: skip
        before = [(one != 0).sum() for one in weights(model)]
        steps(model, optimizer, rule, 13)
        assert [(one != 0).sum() for one in weights(model)] == before
        return model, looked_at

    whole, _ = trained()
    half, looked_at = trained(sample=0.5)
    # the first change drops 0.3 · (1 + cos(π / 4)) of each layer's weights, and half of what may grow is looked at
    sizes = [(one.numel(), int((one != 0).sum())) for one in weights(network())]
    share = 0.3 * (1 + math.cos(math.pi / 4))
    assert looked_at[:2] == [(size - stored + int(share * stored)) // 2 for size, stored in sizes]
    assert any((one != other).any() for one, other in zip(weights(whole), weights(half), strict=True))
    again, _ = trained(sample=0.5)
    assert all(torch.equal(one, other) for one, other in zip(weights(half), weights(again), strict=True))
    nearly, _ = trained(sample=1 - 1e-9)  # all but one
    assert sum((one != 0).ne(other != 0).sum() for one, other in zip(weights(whole), weights(nearly), strict=True)) <= 8
    for wrong in (0.0, 1.5):
        with pytest.raises(ConfigError, match="sample is"):
            RigL(whole, torch.optim.SGD(whole.parameters()), end=1, sample=wrong)


def test_equal_gradients_go_to_the_lowest_position_and_nan_comes_last():
    layer = layer_of()
    seen = GradientAccumulator(layer)
    with seen.watching():
        (layer(torch.ones(1, 4)) * torch.tensor([2.0, math.nan, 2.0])).sum().backward()
    found = seen.candidates(5, Pattern.of(layer.weight))
    assert [*zip(found.row.tolist(), found.col.tolist(), strict=True)] == [(0, 1), (0, 3), (1, 0), (2, 0), (2, 2)]


def test_what_a_backward_counted_stays_whatever_becomes_of_its_buffers():
    layer, buffer = layer_of(), torch.empty(4)
    seen, dense = GradientAccumulator(layer), torch.zeros(3, 4)
    for seed in range(2):
        buffer.copy_(signal(4, seed=seed))
        with seen.watching():
            y = layer(x=buffer)
            y.square().sum().backward()
        dense += 2 * y.detach()[:, None] * buffer
        layer.bias.grad.zero_()  # of one row it may be the gradient of the result itself
    kept = Pattern.of(layer.weight)
    expected = dense.abs().masked_fill(kept.mask(), -1).flatten().argsort(descending=True)[:3].sort().values
    assert seen.candidates(3, kept).keys.tolist() == expected.tolist()
    with pytest.raises(ZeroDivisionError), seen.watching():
        layer(buffer).sum().backward()
        1 / 0  # noqa: B018
    assert not seen.reached


def test_layers_that_no_backward_reached_stay_as_they_are():
    model = nn.ModuleList([layer_of(), layer_of(), SparseLinear(CSR.from_dense(torch.zeros(0, 4)))])
    rigl = RigL(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, end=10, fraction=1.0)
    rigl.update()
    with rigl.watch():
        sum(layer(signal(5, 4)).square().sum() for layer in (model[1], model[2])).backward()
    before = rigl.managers["0"].pattern
    assert rigl.update() and rigl.managers["0"].pattern == before != rigl.managers["1"].pattern


def test_settings_are_checked():
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    for wrong in ({"every": 0}, {"end": -1}, {"fraction": 1.5}):
        with pytest.raises(ConfigError, match="every .*, end .*, fraction"):
            RigL(model, optimizer, **{"end": 10, **wrong})
    with pytest.raises(ConfigError, match="no SparseLinear"):
        RigL(nn.Linear(2, 2), optimizer, end=10)
    assert list(RigL(model, optimizer, end=10, filter=lambda layer, name: name == "2").managers) == ["2"]
    rule = RigL(model, optimizer, end=10, every=1)
    assert repr(rule) == "RigL(2 layers, every=1, end=10, fraction=0.3, steps=0)"
    rule.update()
    with pytest.raises(PatternError, match="no backward reached the layer"):
        rule.update()


# ---- processes ------------------------------------------------------------------------------------------------------


def even() -> nn.Module:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))
    return sparsecomp.sparsify(model, sparsecomp.ConstantFanIn(0.6), filter=lambda layer, name: name != "4")


def _process(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    _train_in_two(rank)
    gc.collect()  # the last owner of a process group must not be DistributedDataParallel: its end would never come
    dist.destroy_process_group()


def _train_in_two(rank: int) -> None:
    for kind in (RigL, SET, RandomGrowth, SRigL):
        model, alone = (even if kind is SRigL else network)(), (even if kind is SRigL else network)()
        shared, pairs = nn.parallel.DistributedDataParallel(model), []
        for forward, module, rows in ((shared, model, slice(rank * 8, rank * 8 + 8)), (alone, alone, slice(None))):
            # Adam's first steps are as long for every new weight, which makes ties that rounding breaks
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            rule = kind(forward, optimizer, every=2, end=20, fraction=0.5)
            rule.gamma = 0.95  # of SRigL
            for step in range(9):
                optimizer.zero_grad()
                with rule.watch():
                    x, y = signal(16, 9, seed=step)[rows], signal(16, 3, seed=step + 700)[rows]
                    F.mse_loss(forward(x), y).backward()
                if not rule.update():
                    optimizer.step()
            pairs.append(weights(module))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    _mask_in_two(rank)


def _mask_in_two(rank: int) -> None:
    """Masks follow from the weights, which are the same in all processes."""
    found = []
    for rows in (slice(rank * 8, rank * 8 + 8), slice(None)):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3))
        sr_ste(model, sparsecomp.NM(1, 3))
        forward = model if rows == slice(None) else nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(9):
            optimizer.zero_grad()
            F.mse_loss(forward(signal(16, 9, seed=step)[rows]), signal(16, 3, seed=step + 700)[rows]).backward()
            optimizer.step()
        found.append((model[0].weight, model[2].weight))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.slow(reason="starts processes")
def test_two_processes_change_alike_and_as_one_with_all_data(tmp_path):
    mp.spawn(_process, args=(str(tmp_path / "store"),), nprocs=2)
