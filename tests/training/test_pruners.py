"""Pruners and stabilisers against brute force and against the layers' own outputs."""

import pytest
import torch

from sparsecomp.errors import MaskError
from sparsecomp.training.pruning import stabilisers
from sparsecomp.training.pruning.calibration import InputStatistics
from sparsecomp.training.pruning.pruners import PRUNERS, SparseGPT, Wanda, best_of_rows, pruner_of
from sparsecomp.training.pruning.scores import (
    input_norms,
    magnitude_mask,
    n_of_m_mask,
    rowwise_mask,
    unfolded,
    wanda_scores,
)
from sparsecomp.training.pruning.sparsegpt import input_products, sparsegpt, sparsegpt_n_of_m


def test_magnitude_counts_and_refuses_nan():
    weight = torch.tensor([[3.0, -5.0, 1.0], [1.0, -1.0, 4.0]])
    assert magnitude_mask(weight, 4).tolist() == [[True, True, True], [False, False, True]]
    assert not magnitude_mask(weight, 0).any()
    with pytest.raises(MaskError, match="NaN"):
        magnitude_mask(weight * torch.nan, 1)


def test_wanda_ranks_within_each_row():
    weight = torch.tensor([[4.0, 1.0, 2.0, 3.0], [0.1, 0.4, 0.3, 0.2]])
    norms = input_norms(torch.tensor([[[3.0, 0, 0, 1]], [[4.0, 20, 0, 0]]]))
    assert norms.tolist() == [5, 20, 0, 1]
    scores = wanda_scores(-weight, norms)
    torch.testing.assert_close(scores, torch.tensor([[20.0, 20, 0, 3], [0.5, 8, 0, 0.2]]))
    kept = rowwise_mask(scores, 0.5)
    assert kept.tolist() == [[True, True, False, False], [True, True, False, False]]
    assert rowwise_mask(torch.ones(2, 3), 0.3).all(), "int(3 * 0.3) is 0"


def test_unfold_gives_the_convolutions_fan_in():
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 5, 3, stride=2, padding=1, dtype=torch.float64)
    images = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    tokens = unfolded(images, layer)
    out = (tokens @ layer.weight.reshape(5, -1).T + layer.bias).reshape(2, 16, 5).transpose(1, 2).reshape(2, 5, 4, 4)
    torch.testing.assert_close(out, layer(images))
    assert wanda_scores(layer.weight, input_norms(tokens)).shape == layer.weight.shape


@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 3, 3)])
def test_n_of_m_along_the_input(shape):
    kept = n_of_m_mask(torch.rand(shape, generator=torch.Generator().manual_seed(0)), 2, 4)
    assert kept.shape == shape and (kept.unflatten(1, (2, 4)).sum(2) == 2).all()
    with pytest.raises(MaskError):
        n_of_m_mask(torch.rand(6, 6), 2, 4)


def _layer():
    torch.manual_seed(0)
    x = torch.randn(500, 32) + torch.rand(32) * 2
    weight = torch.randn(16, 32)
    scores = wanda_scores(weight, input_norms(x))
    return x, weight, scores, rowwise_mask(scores, 0.6)


def test_bias_shift_removes_the_mean_error():
    x, weight, _, mask = _layer()
    sparse = x @ (weight * mask).T + stabilisers.bias_shift(weight, mask, x.mean(0))
    torch.testing.assert_close(sparse.mean(0), (x @ weight.T).mean(0), atol=1e-4, rtol=0)


def _dsnot_row(weight, mask, scores, mean, variance, threshold):
    """The published loop for one row, in Python floats."""
    w, kept, s = weight.tolist(), mask.tolist(), scores.tolist()
    m, v = mean.tolist(), variance.tolist()
    for _ in range(50):
        error = sum(w[j] * m[j] for j in range(len(w)) if not kept[j])
        sign = 1 if error > 0 else -1
        grow = [j for j in range(len(w)) if not kept[j] and sign * w[j] * m[j] > 0]
        drop = [j for j in range(len(w)) if kept[j] and sign * w[j] * m[j] < 0]
        if abs(error) <= threshold or not grow or not drop:
            break
        kept[max(grow, key=lambda j: sign * w[j] * m[j] / v[j])] = True
        kept[min(drop, key=lambda j: s[j])] = False
    return kept


def test_dsnot_keeps_counts_and_shrinks_the_error():
    x, weight, scores, mask = _layer()
    after = stabilisers.dsnot_mask(weight, mask, scores, x.mean(0), x.var(0), threshold=0.1)
    assert torch.equal(after.sum(1), mask.sum(1)) and not torch.equal(after, mask)
    # a swap may overshoot, so the error need not end near the threshold; it must end below where it began
    errors = [stabilisers.bias_shift(weight, m, x.mean(0)).abs().mean() for m in (mask, after)]
    assert errors[1] < errors[0]
    for row in range(len(weight)):
        expected = _dsnot_row(weight[row], mask[row], scores[row], x.mean(0), x.var(0), 0.1)
        assert after[row].tolist() == expected
    still = stabilisers.dsnot_mask(weight, mask, scores, x.mean(0), x.var(0), threshold=1e9)
    assert torch.equal(still, mask)


def test_dsnot_one_swap_by_hand():
    weight, mean = torch.tensor([[3.0, 2.0, -1.0, -2.0, 5.0]]), torch.ones(5)
    mask = torch.tensor([[False, False, True, True, True]])  # e = 5
    variance = torch.tensor([9.0, 1.0, 1.0, 1.0, 1.0])  # 3/9 < 2/1: the second grows
    after = stabilisers.dsnot_mask(weight, mask, weight.abs(), mean, variance, cycles=1)
    assert after.tolist() == [[False, True, False, True, True]]


def test_all_pruned_row_and_bad_parts():
    weight, mean = torch.ones(2, 3), torch.ones(3)
    empty = torch.zeros(2, 3, dtype=torch.bool)
    assert not stabilisers.dsnot_mask(weight, empty, weight, mean, mean).any()
    assert stabilisers.bias_shift(weight, empty, mean).tolist() == [3, 3]
    with pytest.raises(MaskError):
        stabilisers.bias_shift(weight, empty.float(), mean)
    other_sizes = ((weight, empty[:1], mean), (weight, empty, mean[:2]))
    other_dimensions = ((weight[0], empty[0], mean[0]), (weight, empty, weight))
    for bad in other_sizes + other_dimensions:
        with pytest.raises(MaskError, match="fan_in"):
            stabilisers.bias_shift(*bad)
    for bad in ((weight[:1], mean), (weight, mean[:2])):
        with pytest.raises(MaskError, match="scores"):
            stabilisers.dsnot_mask(weight, empty, bad[0], mean, bad[1])


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _packed() -> tuple[torch.Tensor, list[torch.Tensor], tuple[InputStatistics, ...]]:
    """A weight whose rows have three inputs, as of packed attention: these, and what is known of them."""
    tokens = [_drawn(50, 8, seed=part) * (part + 1) for part in range(3)]
    parts = tuple(InputStatistics(8, torch.device("cpu"), products=True) for _ in tokens)
    for part, seen in zip(parts, tokens, strict=True):
        part.add(seen)
    return _drawn(6, 8, seed=9), tokens, parts


@pytest.mark.parametrize("name", PRUNERS)
def test_without_statistics_each_ranks_by_magnitude(name):
    weight, pruner = _drawn(6, 8), PRUNERS[name]
    for kept, mask in (pruner.prune(weight, 20, ()), pruner.prune_groups(weight, 2, 4, ())):
        assert kept is weight and mask.dtype is torch.bool and mask.shape == weight.shape
    assert pruner.prune(weight, 20, ())[1].sum() == 20
    assert (pruner.prune_groups(weight, 2, 4, ())[1].view(6, 2, 4).sum(-1) == 2).all()
    if name != "random":
        assert torch.equal(pruner.prune(weight, 20, ())[1], magnitude_mask(weight, 20))
        assert torch.equal(pruner.prune_groups(weight, 2, 4, ())[1], n_of_m_mask(weight.abs(), 2, 4))


def test_wanda_reads_the_norm_of_each_rows_own_input():
    weight, tokens, parts = _packed()
    scores = weight.abs() * torch.stack([seen.norm(dim=0) for seen in tokens]).repeat_interleave(2, 0)
    kept, mask = Wanda().prune(weight, 24, parts)
    assert kept is weight and torch.equal(mask, rowwise_mask(scores, 0.5))
    assert torch.equal(Wanda().prune_groups(weight, 2, 4, parts)[1], n_of_m_mask(scores, 2, 4))
    assert not Wanda().prune(weight, 0, parts)[1].any()


def test_sparsegpt_solves_each_rows_own_input():
    weight, tokens, parts = _packed()
    for found, solve in (
        (SparseGPT(0.1).prune(weight, 24, parts), lambda rows, seen: sparsegpt(rows, seen, 0.5, 0.1)),
        (SparseGPT(0.1).prune_groups(weight, 2, 4, parts), lambda rows, seen: sparsegpt_n_of_m(rows, seen, 2, 4, 0.1)),
    ):
        solved = [solve(rows, input_products(seen)) for rows, seen in zip(weight.chunk(3), tokens, strict=True)]
        for mine, theirs in zip(found, map(torch.cat, zip(*solved, strict=True)), strict=True):
            torch.testing.assert_close(mine, theirs)
    kept, mask = SparseGPT().prune(weight, 0, parts)
    assert kept is weight and not mask.any()


def test_names_settings_and_what_each_pruner_reads():
    assert {name: (pruner.calibrated, pruner.products) for name, pruner in PRUNERS.items()} == {
        "magnitude": (False, False), "random": (False, False), "wanda": (True, False), "sparsegpt": (True, True)
    }  # fmt: skip
    mine = SparseGPT(0.5)
    assert pruner_of("wanda") is PRUNERS["wanda"] and pruner_of(mine) is mine
    for wrong in ("best", 3, Wanda, None):
        with pytest.raises(MaskError, match="give one of 'magnitude', 'random', 'wanda', 'sparsegpt' or a pruner"):
            pruner_of(wrong)
    for damping in (0.0, -1.0, True, "a lot", float("inf"), float("nan")):
        with pytest.raises(MaskError, match="damping"):
            SparseGPT(damping)


def test_rows_of_a_convolution_and_of_nothing():
    _, _, parts = _packed()
    weight = _drawn(6, 2, 2, 2)
    mask = Wanda().prune(weight, 24, parts)[1]
    assert mask.shape == weight.shape and torch.equal(mask.flatten(1), Wanda().prune(weight.flatten(1), 24, parts)[1])
    assert best_of_rows(torch.zeros(0, 4), 0).shape == (0, 4)
