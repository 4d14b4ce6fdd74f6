"""The cycle between optimizer steps: calibration, pruning, repair, commit, and what it reports."""

import copy

import pytest
import torch
from torch import nn

from sparsecomp.errors import ConfigError, MaskError
from sparsecomp.nn.masked.layers import masked_weights, wrap_module
from sparsecomp.nn.masked.masked_weight import Mode
from sparsecomp.training.history import CycleReport
from sparsecomp.training.pruning.calibration import InputStatistics, calibrate
from sparsecomp.training.pruning.pruners import best_of_rows
from sparsecomp.training.resu.ablation import ablate
from sparsecomp.training.resu.adamw import RESUAdamW
from sparsecomp.training.resu.config import RESUConfig
from sparsecomp.training.resu.cycle import Phase, RESUCycle

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.quick_cases(2)]


class _Network(nn.Module):
    """A convolution, an attention, tied linear layers, dropout and batch norm; images are (N, 4, 6, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = torch.relu(self.norm(self.conv(images))).flatten(2).transpose(1, 2)
        attended, _ = self.attention(tokens, tokens, tokens)
        return self.head(torch.relu(self.second(torch.relu(self.first(tokens + attended)))).mean(1))


def _images(seed=0):
    return torch.randn(32, 4, 6, 6, generator=torch.Generator().manual_seed(seed)) + 0.5


def _network():
    torch.manual_seed(0)
    return wrap_module(_Network())


def _statistics(model, products=False):
    return calibrate(model, [_images(1), _images(2)], model, products=products)


def _cycle(model=None, **settings):
    config = RESUConfig(**{"cycles": 2, "train_steps": 3, "resu_steps": 25, "finetune_steps": 2, **settings})
    model = _network() if model is None else model
    return RESUCycle(model, RESUAdamW(model, lr=1e-2), config)


def _step(cycle):
    generator = torch.Generator().manual_seed(cycle.cycle * 100 + cycle.step)
    labels = torch.randint(0, 3, (32,), generator=generator)
    nn.functional.cross_entropy(cycle.model(_images(labels[0].item())), labels).backward()
    cycle.optimizer.step()
    cycle.optimizer.zero_grad()
    cycle.count_step()


def _next(cycle, products=False):
    while cycle.steps_left:
        _step(cycle)
    return cycle.advance(lambda: _statistics(cycle.model, products))


def test_mean_outputs_follow_from_the_statistics():
    """A layer's mean output is W E[x] + b, whatever way its input took."""
    model = _network()
    outputs = {}

    def record(name):
        def hook(module, inputs, output):
            output = output[0] if isinstance(output, tuple) else output
            rows = output.transpose(0, 1).flatten(1) if name == "conv" else output.flatten(0, -2).T
            outputs.setdefault(name, []).append(rows)

        return hook

    names = ("conv", "attention", "first", "second", "head")
    handles = [getattr(model, name).register_forward_hook(record(name)) for name in names]
    statistics = _statistics(model)
    for handle in handles:
        handle.remove()
    assert set(statistics) == set(masked_weights(model))
    for name, weight, bias in (
        ("conv", "conv.weight", model.conv.bias),
        ("attention", "attention.out_proj.weight", model.attention.out_proj.bias),
        ("head", "head.weight", model.head.bias),
    ):
        (part,) = statistics[weight]
        matrix = dict(masked_weights(model))[weight][0].flatten(1).double()
        torch.testing.assert_close(
            (matrix @ part.mean + bias).float(), torch.cat(outputs[name], 1).mean(1), atol=1e-5, rtol=1e-5
        )
    query, key, value = statistics["attention.in_proj_weight"]
    assert query.mean.equal(key.mean) and query.norm.equal(value.norm)
    # the tied weight has seen the tokens of both its layers
    assert statistics["first.weight"][0].count == 2 * 2 * 32 * 36 and statistics["head.weight"][0].count == 64
    assert model.training and model.attention.training and model.norm.num_batches_tracked == 0


def test_statistics_of_large_means_keep_their_digits():
    torch.manual_seed(0)
    tokens = torch.randn(3, 200, 5) + 1e4
    statistics = InputStatistics(5, torch.device("cpu"), products=True)
    for part in tokens:
        statistics.add(part)
    wide = tokens.double().flatten(0, 1)
    # E[x^2] - E[x]^2 in fp32 would be off by more than the variance itself
    torch.testing.assert_close(statistics.variance, wide.var(0, correction=0), atol=0, rtol=2e-4)
    torch.testing.assert_close(statistics.norm, wide.norm(dim=0), atol=0, rtol=1e-7)
    torch.testing.assert_close(statistics.products.double(), 2 * wide.T @ wide, atol=0, rtol=1e-5)


def test_padding_is_dropped():
    model = wrap_module(nn.Sequential(nn.Linear(4, 3)))
    tokens, valid = torch.randn(2, 5, 4), torch.rand(2, 5) < 0.5
    valid[0, 0] = True
    found = calibrate(model, [tokens], model, token_mask=lambda batch: valid)["0.weight"][0]
    torch.testing.assert_close(found.mean.float(), tokens[valid].mean(0))
    assert found.count == valid.sum()


def test_a_convolution_with_groups_has_no_statistics():
    model = wrap_module(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2)))
    assert list(calibrate(model, [torch.randn(2, 4, 3, 3)], model)) == ["2.weight"]


def test_rows_share_a_count_exactly():
    scores = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    for keep in range(36):
        kept = best_of_rows(scores, keep)
        counts = kept.sum(1)
        assert kept.sum() == keep and counts.max() - counts.min() <= 1
        assert (scores.masked_fill(~kept, 2).amin(1) >= scores.masked_fill(kept, -1).amax(1)).all()
        longer = counts > keep // 5
        nexts = scores.sort(1, descending=True).values[:, min(keep // 5, 6)]
        assert not longer.any() or longer.all() or nexts[longer].min() >= nexts[~longer].max()


PRUNERS = {
    "magnitude": {"pruner": "magnitude"},
    "wanda": {"pruner": "wanda"},
    "dsnot": {"pruner": "wanda", "stabiliser": "dsnot"},
    "sparsegpt": {"pruner": "sparsegpt"},
    "none": {"stabiliser": "none", "budget": "uniform"},
    "2:4": {"pruner": "n_of_m", "n_of_m": (2, 4), "sparsity_start": 0.5, "sparsity_end": 0.5},
}


@pytest.mark.parametrize("name", PRUNERS)
def test_counts_are_exact_in_every_phase(name):
    cycle = _cycle(**PRUNERS[name])
    weights = masked_weights(cycle.model)
    size = sum(weight.numel() for weight, _ in weights.values())
    seen = []
    while not cycle.done:
        before = {key: masked.mask.mask.clone() for key, (_, masked) in weights.items()}
        ended = _next(cycle, products=name == "sparsegpt")
        seen.append(str(ended))
        kept = sum(int(masked.mask.mask.sum()) for _, masked in weights.values())
        if ended is Phase.PRUNE and name not in ("sparsegpt", "none"):
            assert kept == round(size * (1 - cycle.config.sparsity(cycle.cycle)))
        for key, (weight, masked) in weights.items():
            if ended in (Phase.STABILIZE, Phase.COMMIT):
                assert masked.mask.mask.sum() == before[key].sum()
            if ended is not Phase.RESU and masked.mode is not Mode.DENSE:
                assert masked.effective(weight)[~masked.mask.mask].eq(0).all()
            if ended in (Phase.PRUNE, Phase.COMMIT, Phase.FINETUNE):
                moments = [cycle.optimizer.state[weight][part] for part in ("exp_avg", "exp_avg_sq")]
                assert all(part[~masked.mask.mask].eq(0).all() and part.ne(0).any() for part in moments)
            if name == "2:4" and ended is Phase.COMMIT:
                assert (masked.mask.mask.unflatten(1, (-1, 4)).sum(2) == 2).all()
    one = ["train", "prune", "stabilize", "resu", "commit"]
    assert seen == [*one, *one, "finetune"]
    report = cycle.history.cycles[-1]
    assert report.kept == kept and report.size == size and report.sparsity == 1 - kept / size
    assert report.moved > 0 and report.resurrected > 0
    assert [layer.calibrated for layer in report.layers] == [name != "none"] * len(weights)
    with pytest.raises(RuntimeError, match="done"):
        cycle.advance(dict)


def test_the_bias_shift_keeps_mean_outputs_and_resu_starts_as_the_same_function():
    torch.manual_seed(0)
    model = wrap_module(nn.Sequential(nn.Linear(12, 6)))
    inputs = torch.randn(64, 12) + torch.rand(12)
    cycle = _cycle(model, train_steps=0, pruner="wanda", sparsity_start=0.6)
    dense = model(inputs).mean(0)
    for phase in (Phase.TRAIN, Phase.PRUNE):
        assert cycle.advance(lambda: calibrate(model, [inputs], model)) is phase
    assert not torch.allclose(model(inputs).mean(0), dense, atol=1e-3)
    cycle.advance(dict)
    torch.testing.assert_close(model(inputs).mean(0), dense, atol=1e-5, rtol=0)
    masked = masked_weights(model)["0.weight"][1]
    assert masked.mode is Mode.RESU and masked.mask.sparsity == pytest.approx(1 - 29 / 72)


def test_every_weight_of_an_attention_is_pruned_and_its_biases_shifted():
    torch.manual_seed(0)
    model = wrap_module(nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True))
    inputs = [torch.randn(5, 7, width) + 1 for width in (8, 6, 4)]
    cycle = _cycle(model, train_steps=0, pruner="wanda", sparsity_start=0.5, budget="uniform")

    def means():
        # softmax stands between the projections, so each is looked at by itself
        rows = (model.q_proj_weight, model.k_proj_weight, model.v_proj_weight)
        found = [x.mean((0, 1)) @ w.T for x, w in zip(inputs, rows, strict=True)]
        return torch.cat(found).detach() + model.in_proj_bias.detach()

    before = means()
    for _ in range(3):
        cycle.advance(lambda: calibrate(model, [inputs], lambda batch: model(*batch)))
    torch.testing.assert_close(means(), before, atol=1e-5, rtol=0)
    assert {name: masked.mask.sparsity for name, (_, masked) in masked_weights(model).items()} == dict.fromkeys(
        ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"), 0.5
    )
    assert model.out_proj.bias.ne(0).any(), "a new attention has a bias of 0 there"


def test_a_tied_weight_shifts_the_bias_of_each_of_its_layers_once():
    model = _network()
    cycle = _cycle(model, train_steps=0, sparsity_start=0.6)
    biases = [model.first.bias.detach().clone(), model.second.bias.detach().clone()]
    for _ in range(2):
        _next(cycle)
    kept = model.first.weight.detach().clone()
    before = cycle.state_dict()["layers"]["first.weight"]
    lost, mean = before["before"] - kept, before["parts"][0]["mean"]
    _next(cycle)
    for layer, bias in zip((model.first, model.second), biases, strict=True):
        torch.testing.assert_close(layer.bias.detach(), bias + (lost.double() @ mean).float(), atol=1e-6, rtol=1e-5)


def test_resurrections_are_counted_as_by_hand():
    cycle = _cycle(cycles=4, sparsity_start=0.5, sparsity_end=0.7, amnesty_end=0.3)
    weights = masked_weights(cycle.model)
    alive, ever = set(), 0
    while not cycle.done:
        before = {name: masked.mask.mask.clone() for name, (_, masked) in weights.items()}
        ended = _next(cycle)
        now = {name: masked.mask.mask for name, (_, masked) in weights.items()}
        if ended not in (Phase.STABILIZE, Phase.COMMIT):
            continue
        alive = {(name, at) for name, at in alive if now[name].flatten()[at]}
        if ended is Phase.COMMIT:
            report = cycle.history.cycles[-1]
            assert (report.earlier, report.surviving) == (ever, len(alive))
            back = _places({name: now[name] & ~before[name] for name in now})
            assert report.resurrected == len(back) > 0
            ever, alive = ever + len(back), alive | back
    assert len(alive) > 0
    assert _places(cycle.resurrected()) == alive


def _places(masks):
    return {(name, at) for name, mask in masks.items() for at in mask.flatten().nonzero().flatten().tolist()}


def test_ablation_takes_the_resurrected_out_and_puts_them_back():
    cycle = _cycle()
    while not cycle.done:
        _next(cycle)
    model, chosen = cycle.model, cycle.resurrected()
    images = _images(3)
    state = copy.deepcopy(model.state_dict())
    result = ablate(model, chosen, lambda network: network(images).square().sum().item())
    assert result.removed == sum(int(part.sum()) for part in chosen.values()) > 0
    assert all(value.equal(state[name]) for name, value in model.state_dict().items()) and model.training
    # by hand, on the masked weights of a copy
    other = copy.deepcopy(model).eval()
    with torch.no_grad():
        assert result.before == other(images).square().sum().item()
        for name, (weight, _) in masked_weights(other).items():
            weight.mul_(~chosen[name])
        assert result.after == other(images).square().sum().item() != result.before
    with pytest.raises(MaskError):
        ablate(model, {"head.weight": chosen["conv.weight"]}, lambda network: 0.0)


@pytest.mark.parametrize("name", ["magnitude", "wanda", "dsnot", "sparsegpt"])
def test_layers_of_nothing_and_layers_without_a_kept_weight(name):
    torch.manual_seed(0)
    model = wrap_module(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 0), nn.Linear(0, 3)))
    inputs, bias = torch.randn(8, 6), model[2].bias.detach().clone()
    cycle = _cycle(model, cycles=1, train_steps=0, finetune_steps=0, sparsity_end=0.99, **PRUNERS[name])
    while not cycle.done:
        while cycle.steps_left:
            cycle.count_step()
        cycle.advance(lambda: calibrate(model, [inputs], model, products=name == "sparsegpt"))
    assert cycle.history.cycles[0].kept == 0 and not model[0].weight.any()
    assert torch.equal(model(inputs), bias.expand(8, 3))
    assert CycleReport(0, 0, 0, 0, 0, 0, 0, ()).sparsity == 0


@pytest.mark.parametrize("phase", [Phase.PRUNE, Phase.COMMIT])
def test_a_weight_of_nan_leaves_the_other_layers_alone(phase):
    model = wrap_module(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    cycle = _cycle(model, train_steps=0, resu_steps=0)
    while cycle.phase is not phase:
        cycle.advance(dict)
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    before, mode = copy.deepcopy(model.state_dict()), model[0].mode
    with pytest.raises(MaskError, match="NaN"):
        cycle.advance(dict)
    assert all(torch.equal(value.nan_to_num(), before[name].nan_to_num()) for name, value in model.state_dict().items())
    assert model[0].mode is mode and cycle.phase is phase


def test_what_cannot_be_pruned():
    with pytest.raises(ConfigError, match="wrap_module"):
        RESUCycle(nn.Linear(3, 2), RESUAdamW(_network()), RESUConfig())
    with pytest.raises(MaskError, match="wrap_module"):
        RESUAdamW(nn.Linear(3, 2))
    with pytest.raises(ConfigError, match="groups of 4 do not divide the inputs of 0.weight"):
        _cycle(wrap_module(nn.Sequential(nn.Linear(6, 2), nn.Linear(4, 4))), **PRUNERS["2:4"])
    frozen = wrap_module(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
    frozen[1].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="1.weight have requires_grad False"):
        _cycle(frozen)
    assert len(_cycle(frozen, resu_steps=0).resurrected()) == 2 and len(_cycle(frozen, skip=("1",)).resurrected()) == 1
    cycle = _cycle(skip=("attention", "head"))
    _next(cycle), _next(cycle)
    assert cycle.model.head.weight.ne(0).all() and cycle.model.attention.out_proj.weight.ne(0).all()
    assert cycle.model.conv.weight.eq(0).any()
