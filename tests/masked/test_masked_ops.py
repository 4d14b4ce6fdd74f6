"""Operations on a weight and its mask, against boolean indexing, counting by hand and the commit's own choice."""

import pytest
import torch
from kernel_devices import DEVICES

from sparsecomp.errors import MaskError
from sparsecomp.ops import (
    gather_pruned,
    masked_add,
    masked_blend,
    masked_mul,
    scatter_pruned,
    select_largest,
    tournament,
)
from sparsecomp.training.resu.amnesty import amnesty_mask


def sample(device="cpu"):
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(5, 7, generator=random) < 0.4
    return torch.randn(5, 7, generator=random).to(device), mask.to(device), torch.randn(5, 7).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_phi_and_its_inverse(device):
    weight, mask, _ = sample(device)
    pruned = int((~mask).sum())
    theta = gather_pruned(weight, mask, pruned)
    assert torch.equal(theta, weight[~mask])
    assert torch.equal(scatter_pruned(theta, mask), weight * ~mask)


@pytest.mark.parametrize("device", DEVICES)
def test_masked_arithmetic_keeps_bits_and_gradients_apart(device):
    weight, mask, other = sample(device)
    weight[~mask] = torch.nan
    other[mask] = torch.inf
    weight.requires_grad_(), other.requires_grad_()
    blend = masked_blend(weight, other, mask)
    assert torch.equal(blend[mask], weight[mask]) and torch.equal(blend[~mask], other[~mask])
    gradient = torch.randn_like(blend)
    blend.backward(gradient)
    assert torch.equal(weight.grad, gradient.masked_fill(~mask, 0))
    assert torch.equal(other.grad, gradient.masked_fill(mask, 0))
    product = masked_mul(weight, mask)
    assert torch.equal(product, weight.detach().masked_fill(~mask, 0))
    assert torch.autograd.grad(product.sum(), weight)[0].eq(mask).all()
    added = masked_add(other.detach(), weight.detach(), ~mask)
    assert torch.equal(added[mask], other[mask]) and added[~mask].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_with_a_count_on_the_device(device):
    scores = torch.tensor([1.0, 3.0, 3.0, torch.nan, 2.0, 3.0, torch.inf, -torch.inf], device=device)
    places = {0: [], 2: [1, 6], 3: [1, 2, 6], 5: [1, 2, 4, 5, 6], 7: [0, 1, 2, 3, 4, 5, 6], 9: list(range(8)), -1: []}
    for count, chosen in places.items():
        for given in (count, torch.tensor(count, device=device)):
            assert select_largest(scores, given).nonzero().reshape(-1).tolist() == chosen


@pytest.mark.parametrize("device", DEVICES)
def test_a_tournament_by_hand(device):
    """Of six places two are the resurrected's, 5 and 4; the active keep 9, 2, 2 and the first 1."""
    weight = torch.tensor([[1.0, -5.0, 2.0, 0.0], [1.0, 3.0, -9.0, 2.0], [1.0, 4.0, 1.0, 0.5]], device=device)
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 0]], device=device).bool()
    expected = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]], device=device).bool()
    assert torch.equal(tournament(weight, mask, 6, 0.3), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tournament_chooses_as_the_commit_does(device):
    random = torch.Generator().manual_seed(0)
    for case in range(60):
        numel = 1 + case % 23
        # few values, so that many are equal, and zeros among them
        weight = torch.randint(-3, 4, (numel,), generator=random).float()
        mask = torch.rand(numel, generator=random) < torch.rand(1, generator=random)
        keep, rate = int(torch.randint(0, numel + 1, (1,), generator=random)), (case % 5) / 4
        chosen = tournament(weight.to(device), mask.to(device), keep, rate)
        assert torch.equal(chosen.cpu(), amnesty_mask(weight, mask, keep, rate)), (weight, mask, keep, rate)
        assert int(chosen.sum()) == keep


def test_bad_operands_are_named():
    weight, mask, other = sample()
    for call in (
        lambda: masked_mul(weight, mask.float()), lambda: masked_add(weight, other, mask[:2]),
        lambda: masked_blend(weight, other.double(), mask), lambda: tournament(weight, mask, 36, 0.5),
        lambda: masked_add(weight, other.double(), mask), lambda: masked_add(weight, other[None], mask),
        lambda: tournament(weight, mask, 3, 1.5), lambda: scatter_pruned(torch.zeros(2), mask),
    ):  # fmt: skip
        with pytest.raises(MaskError, match="needed|prunes"):
            call()
