"""The commit's choice against a count by hand and against sorting in Python."""

import pytest
import torch

from sparsecomp.errors import MaskError
from sparsecomp.training.resu.amnesty import amnesty_mask, amnesty_n_of_m


def _by_sorting(weight, mask, keep, rate):
    """Python's stable sort over (size, place)."""
    sizes = weight.abs().flatten().tolist()
    active = mask.flatten().tolist()

    def best(places, count):
        return sorted(places, key=lambda at: -sizes[at])[:count]

    places = range(len(sizes))
    theta = [at for at in places if not active[at] and sizes[at]]
    chosen = best(theta, round(rate * keep))
    chosen += best([at for at in places if active[at]], keep - len(chosen))
    chosen += best([at for at in places if at not in chosen], keep - len(chosen))
    return torch.tensor([at in chosen for at in places]).reshape(mask.shape)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("keep", [0, 7, 20, 33, 60, 77])
def test_the_choice_is_exact(keep, rate):
    torch.manual_seed(keep)
    # few values, so that many scores are equal, and zeros among theta
    weight = torch.randint(-4, 5, (7, 11)).float()
    mask = torch.rand(7, 11) < 0.4
    chosen = amnesty_mask(weight, mask, keep, rate)
    assert chosen.sum() == keep
    assert torch.equal(chosen, _by_sorting(weight, mask, keep, rate))


def test_resurrected_weights_compete_apart():
    weight = torch.tensor([9.0, 8, 7, 6, 0.2, 0.1, 0, 0])
    mask = torch.tensor([True] * 4 + [False] * 4)
    assert amnesty_mask(weight, mask, 4, 0.25).tolist() == [True, True, True, False, True, False, False, False]
    # two theta are not 0: a rate of 1 brings no more back
    assert amnesty_mask(weight, mask, 4, 1.0).tolist() == [True, True, False, False, True, True, False, False]
    assert amnesty_mask(weight, mask, 4, 0.0).equal(mask)
    # the active ones are too few: theta first, then a zero by index
    assert amnesty_mask(weight, mask, 7, 0.0).tolist() == [True] * 7 + [False]


def test_groups_keep_their_count():
    torch.manual_seed(0)
    weight = torch.randn(6, 8, 3)
    mask = torch.zeros(6, 8, 3, dtype=torch.bool)
    mask[:, ::2] = True
    for rate in (0.0, 0.2, 1.0):
        chosen = amnesty_n_of_m(weight, mask, rate, 2, 4)
        assert (chosen.unflatten(1, (2, 4)).sum(2) == 2).all()
        assert (chosen & ~mask).sum() <= round(rate * mask.sum().item())
    assert amnesty_n_of_m(weight, mask, 0.0, 2, 4).equal(mask)
    assert amnesty_n_of_m(weight * 0, mask, 1.0, 2, 4).equal(mask), "nothing moved, nothing changes"
    best = weight.abs().unflatten(1, (2, 4)).argsort(2, descending=True).argsort(2) < 2
    assert amnesty_n_of_m(weight, mask, 1.0, 2, 4).equal(best.flatten(1, 2))


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (0, 3)])
def test_small_and_empty(shape):
    weight = torch.ones(shape)
    assert amnesty_mask(weight, torch.zeros(shape, dtype=torch.bool), weight.numel(), 0.5).all()
    assert not amnesty_mask(weight, torch.ones(shape, dtype=torch.bool), 0, 0.5).any()


def test_bad_parts():
    weight, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for bad in (
        (weight[:1], mask, 1, 0.5),
        (weight, mask.float(), 1, 0.5),
        (weight, mask, 7, 0.5),
        (weight, mask, -1, 0.5),
        (weight, mask, 1, 1.5),
        (weight * torch.nan, mask, 1, 0.5),
        (weight * torch.inf, mask, 1, 0.5),
    ):
        with pytest.raises(MaskError):
            amnesty_mask(*bad)
