"""SparseGPT against the loop that its formulae shorten: an exact inverse of what is left of H at every column."""

import pytest
import torch

from sparsecomp.errors import MaskError
from sparsecomp.training.pruning.scores import input_norms, magnitude_mask, rowwise_mask, wanda_scores
from sparsecomp.training.pruning.sparsegpt import input_products, sparsegpt, sparsegpt_n_of_m


def _tokens(count: int, fan_in: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Correlated inputs with a mean and unlike scales, as a network's are."""
    torch.manual_seed(0)
    mixing = torch.randn(fan_in, fan_in, dtype=dtype) / fan_in**0.5 + torch.eye(fan_in, dtype=dtype)
    scales = torch.linspace(0.3, 2, fan_in, dtype=dtype)[torch.randperm(fan_in)]
    return (torch.randn(count, fan_in, dtype=dtype) + 0.5) @ mixing * scales


def _damped(x: torch.Tensor, damping: float = 0.01) -> torch.Tensor:
    products = 2 * x.T @ x
    return products + damping * products.diagonal().mean() * torch.eye(len(products), dtype=products.dtype)


def _reference(weight, damped, stretch, drop):
    """Optimal brain surgeon with the columns before the current one frozen; `drop` weights of a stretch go."""
    work, kept = weight.clone(), torch.ones_like(weight, dtype=torch.bool)
    inverses = [torch.linalg.inv(damped[i:, i:]) for i in range(len(damped))]
    for column, inverse in enumerate(inverses):
        if column % stretch == 0:
            ahead = range(column, min(column + stretch, len(damped)))
            scores = torch.stack([work[:, i] ** 2 / inverses[i][0, 0] for i in ahead], 1)
            for rows in drop(scores):
                order = sorted(rows, key=lambda at: scores[at].item())
                for row, at in order[: int(len(order) * 0.5)]:
                    kept[row, column + at] = False
        for row in range(len(work)):
            if not kept[row, column]:
                work[row, column:] -= work[row, column] / inverse[0, 0] * inverse[:, 0]
                work[row, column] = 0
    return work, kept


def test_one_pruned_column_is_the_optimal_brain_surgeons_update():
    x = _tokens(200, 12)
    weight = torch.randn(3, 12, dtype=torch.float64)
    weight[:, 0] = 1e-3 * torch.tensor([1.0, -2.0, 3.0])  # the lowest scores by far
    pruned, mask = sparsegpt(weight, input_products(x), 1 / 12)
    assert not mask[:, 0].any() and mask[:, 1:].all()
    inverse = torch.linalg.inv(_damped(x))
    torch.testing.assert_close(pruned, weight - weight[:, :1] / inverse[0, 0] * inverse[0])


def test_unstructured_equals_the_loop_over_exact_inverses():
    x, weight = _tokens(300, 20), torch.randn(4, 20, dtype=torch.float64)
    products, before = input_products(x), input_products(x)
    pruned, mask = sparsegpt(weight, products, 0.5)
    expected, kept = _reference(
        weight, _damped(x), 128, lambda scores: [[(r, c) for r in range(4) for c in range(scores.shape[1])]]
    )
    assert torch.equal(mask, kept) and int(mask.sum()) == 40
    torch.testing.assert_close(pruned, expected)
    assert torch.equal(products, before), "the caller's products stay"


@pytest.mark.parametrize("shape", [(5, 16), (5, 8, 2, 1)])
def test_two_of_four_equals_the_loop_and_groups_along_the_input(shape):
    fan_in = torch.Size(shape[1:]).numel()
    x, weight = _tokens(300, fan_in), torch.randn(shape, dtype=torch.float64)
    pruned, mask = sparsegpt_n_of_m(weight, input_products(x), 2, 4)
    assert (mask.unflatten(1, (-1, 4)).sum(2) == 2).all() and not pruned[~mask].any()
    order = [c * (fan_in // shape[1]) + r for r in range(fan_in // shape[1]) for c in range(shape[1])]
    expected, kept = _reference(
        weight.reshape(5, -1)[:, order],
        _damped(x[:, order]),
        4,
        lambda scores: [[(r, c) for c in range(4)] for r in range(5)],
    )
    torch.testing.assert_close(pruned.reshape(5, -1)[:, order], expected)
    assert torch.equal(mask.reshape(5, -1)[:, order], kept)


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
def test_lower_error_than_wanda_and_magnitude_over_several_blocks(sparsity):
    x = _tokens(2000, 300, torch.float32)
    weight = torch.randn(64, 300)
    target = x @ weight.T
    pruned, mask = sparsegpt(weight, input_products(x), sparsity)
    dropped = [int(64 * size * sparsity) for size in (128, 128, 44)]
    assert [int((~part).sum()) for part in mask.split(128, 1)] == dropped and not pruned[~mask].any()
    wanda = rowwise_mask(wanda_scores(weight, input_norms(x)), sparsity)
    others = (weight * wanda, weight * magnitude_mask(weight, int(mask.sum())), weight * mask)
    errors = [(x @ other.T - target).norm().item() for other in (pruned, *others)]
    assert errors[0] < 0.95 * min(errors[1:])


def test_dead_inputs_half_precision_and_the_edges():
    x = _tokens(100, 8, torch.float32)
    x[:, [2, 5]] = 0
    weight = torch.randn(4, 8).bfloat16()
    pruned, mask = sparsegpt(weight, input_products(x), 0.0)
    alive = [0, 1, 3, 4, 6, 7]
    assert pruned.dtype == torch.bfloat16 and mask.all()
    assert torch.equal(pruned[:, alive], weight[:, alive]) and not pruned[:, [2, 5]].any()
    _, mask = sparsegpt(weight, input_products(x), 0.25)
    assert mask[:, alive].all() and not mask[:, [2, 5]].any(), "the dead go first"
    empty, _ = sparsegpt(torch.empty(0, 8), input_products(x), 0.5)
    assert empty.shape == (0, 8)


def test_products_add_up_over_batches():
    x = _tokens(60, 8)
    halves = input_products(x[:20].reshape(4, 5, 8)) + input_products(x[20:])
    torch.testing.assert_close(halves, 2 * torch.einsum("ti,tj->ij", x, x))


def test_bad_input():
    weight, products = torch.randn(4, 6), torch.eye(6)
    bad = [
        (lambda: sparsegpt(weight, torch.eye(5), 0.5), "input_products"),
        (lambda: sparsegpt_n_of_m(weight, torch.eye(5), 1, 2), "input_products"),
        (lambda: sparsegpt(weight, products * torch.nan, 0.5), "NaN"),
        (lambda: sparsegpt(weight * torch.nan, products, 0.5), "NaN"),
        (lambda: sparsegpt(weight, products, 1.0), "sparsity"),
        (lambda: sparsegpt(weight, products, 0.5, damping=0.0), "damping"),
        (lambda: sparsegpt_n_of_m(weight, products, 2, 4), "groups of 4"),
    ]
    for call, word in bad:
        with pytest.raises(MaskError, match=word):
            call()
