"""Masks, schedules, selection and budgets against closed forms and brute force."""

import copy

import numpy as np
import pytest
import torch

from sparsecomp.errors import MaskError, ScheduleError
from sparsecomp.runtime import (
    SparseMask,
    amnesty_rate,
    erk_budget,
    select_above,
    select_top,
    sparsity_at,
    uniform_budget,
)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_partition_and_update(dtype):
    mask = SparseMask(torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype))
    assert mask.active.tolist() == [0, 2, 5] and mask.pruned.tolist() == [1, 3, 4]
    assert mask.active.dtype == torch.int32 and mask.sparsity == 0.5
    storage = mask.mask.data_ptr()
    mask.update(torch.ones(2, 3))
    assert mask.pruned.numel() == 0 and mask.active.numel() == 6 and mask.mask.data_ptr() == storage


@pytest.mark.parametrize(
    "bad",
    [torch.ones(3, 2), torch.full((2, 3), 0.5), torch.full((2, 3), torch.nan), torch.ones(2, 3, device="meta")],
    ids=["shape", "half", "nan", "device"],
)
def test_bad_mask_leaves_the_old_one(bad):
    mask = SparseMask(torch.eye(2, 3))
    with pytest.raises(MaskError):
        mask.update(bad)
    assert mask.active.tolist() == [0, 4]


def test_mask_survives_state_dict_deepcopy_and_to():
    mask = SparseMask(torch.eye(2, 3))
    assert mask.pruned.numel() == 4
    other = SparseMask(torch.ones(2, 3))
    assert other.pruned.numel() == 0
    other.load_state_dict(mask.state_dict())
    assert other.pruned.tolist() == [1, 2, 3, 5]
    twin = copy.deepcopy(mask)
    twin.update(torch.ones(2, 3))
    assert mask.active.tolist() == [0, 4] and twin.active.numel() == 6
    assert mask.to(torch.float16).mask.dtype == torch.bool


@pytest.mark.parametrize("write", [
    lambda mask, other: mask.mask.data.copy_(other),
    lambda mask, other: np.copyto(mask.mask.numpy(), other.numpy()),
    lambda mask, other: torch.from_dlpack(mask.mask.view(torch.uint8)).copy_(other),
    lambda mask, other: setattr(mask.mask, "data", other.clone()),
    lambda mask, other: mask.load_state_dict({"mask": other}, assign=True),
    lambda mask, other: mask.update(other),
])  # fmt: skip
def test_the_lists_are_of_the_mask_that_is_there_whoever_wrote_it(write):
    mask = SparseMask(torch.tensor([True, False, True, True]))
    assert mask.pruned.tolist() == [1] and mask.sparsity == 0.25
    write(mask, torch.tensor([False, True, False, True]))
    assert mask.pruned.tolist() == [0, 2] and mask.active.tolist() == [1, 3] and mask.sparsity == 0.5
    assert mask.pruned_count == 2 and mask.apply_(torch.arange(1.0, 5.0)).tolist() == [0, 2, 0, 4]


@pytest.mark.parametrize("shape", [(0,), (5,), (0, 4), ()])
def test_small_shapes_and_all_pruned(shape):
    mask = SparseMask(torch.zeros(shape))
    weight = torch.full(shape, torch.nan)
    assert mask.active.numel() == 0 and mask.pruned.numel() == weight.numel()
    assert not mask.apply_(weight).isnan().any()


_MIDDLES = {"linear": 0.5, "exponential": 0.924142, "cosine": 0.5, "cubic": 0.875}


@pytest.mark.parametrize("shape, middle", _MIDDLES.items())
def test_schedule_ends_are_reached(shape, middle):
    values = [sparsity_at(c, 5, 0.0, 0.9, shape) for c in range(5)]
    assert values[0] == 0.0 and values[-1] == 0.9 and values == sorted(values)
    assert values[2] == pytest.approx(0.9 * middle, abs=1e-6)
    assert sparsity_at(0, 1, 0.1, 0.9, shape) == 0.9


def test_amnesty_reaches_its_end():
    assert [amnesty_rate(c, 3, 0.3, 0.1) for c in range(3)] == pytest.approx([0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    "call",
    [
        lambda: sparsity_at(0, 5, 0.0, 1.0),
        lambda: sparsity_at(5, 5, 0.0, 0.9),
        lambda: sparsity_at(0, 5, 0.0, float("nan")),
        lambda: sparsity_at(0, 5, 0.0, 0.9, "spiral"),
        lambda: amnesty_rate(0, 0, 0.1, 0.1),
        lambda: uniform_budget({"a": (2, 2)}, 1.0),
        lambda: erk_budget({"a": (2, 2)}, -0.1),
    ],
)
def test_values_outside_the_domain(call):
    with pytest.raises(ScheduleError):
        call()


def test_top_is_stable_and_takes_zero():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert select_top(scores, 2).tolist() == [[False, True, True, False], [True, True, False, False]]
    assert select_top(scores, 0).sum() == 0 and select_top(scores, 4).all()
    assert select_top(torch.empty(0), 0).shape == (0,)
    with pytest.raises(MaskError):
        select_top(scores, 5)


def test_nan_never_wins():
    scores = torch.tensor([torch.nan, 1.0, torch.inf])
    assert select_top(scores, 2).tolist() == [False, True, True]
    assert select_above(scores, 0.5).tolist() == [False, True, True]
    for select in (select_top, select_above):
        with pytest.raises(MaskError, match="NaN"):
            select(scores, 1, refuse_nan=True)


def test_budgets():
    shapes = {"a": (4, 4), "b": (100, 100), "c": (10, 5, 3, 3), "d": (3,)}
    assert uniform_budget(shapes, 0.5) == {"a": 8, "b": 5000, "c": 225, "d": 2}
    kept = erk_budget(shapes, 0.9)
    assert sum(kept.values()) == round((16 + 10000 + 450 + 3) * 0.1)
    # a and d pass density 1; b and c share the other 1028 as 200 : 21
    assert kept == {"a": 16, "b": 930, "c": 98, "d": 3}
    assert erk_budget(shapes, 0.0) == {"a": 16, "b": 10000, "c": 450, "d": 3}
