"""What is remembered of a tensor tells of every counted write and of other memory, and claims are asked no oftener."""

import pytest
import torch
from torch import Tensor

from sparsecomp.passes.engine.proofs import Assumption, Seen


def test_a_tensor_is_still_what_it_was_until_something_tells_otherwise():
    tensor = torch.arange(6.0)
    seen = Seen.of(tensor)
    assert seen.still(tensor) and seen.still(tensor.detach())
    assert not seen.still(tensor[1:]) and not seen.still(tensor.clone())
    tensor.add_(1)
    assert not seen.still(tensor)


def test_other_memory_is_no_longer_the_same():
    tensor = torch.arange(6.0)
    seen = Seen.of(tensor)
    tensor.data = torch.arange(6.0)
    assert not seen.still(tensor)
    seen = Seen.of(tensor)
    tensor.data = torch.empty(0)
    others = [torch.arange(6.0) for _ in range(100)]
    assert all(seen.address != other.data_ptr() for other in others)


def test_writes_under_inference_mode_are_not_counted():
    with torch.inference_mode():
        tensor = torch.arange(6.0)
        seen = Seen.of(tensor)
        tensor.add_(1)
        assert seen.version is None and seen.still(tensor)


class Asked:
    """Whether a tensor's sum is positive, and how often that was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, tensor: Tensor) -> bool:
        assert not tensor.requires_grad
        self.times += 1
        return bool(tensor.sum() > 0)


def test_a_claim_is_asked_anew_of_other_tensors_and_after_writes():
    asked, held = Asked(), torch.ones(3, requires_grad=True)
    assumption = Assumption(asked, held)
    for tensor, true, times in ((held, True, 1), (held, True, 1), (-held, False, 2), (held, True, 3)):
        assert assumption(tensor) is true and asked.times == times
    with torch.no_grad():
        held.neg_()
    assert assumption(held) is False and asked.times == 4
    assert assumption(held) is False and asked.times == 4
    held.data = torch.ones(3)
    assert assumption(held) is True and asked.times == 5


@pytest.mark.parametrize(
    "other", [torch.ones(4), torch.ones(3, 1), torch.ones(3).double(), torch.ones(3, device="meta"), None, 3]
)
def test_what_is_no_such_tensor_is_not_asked(other):
    asked = Asked()
    assert Assumption(asked, torch.ones(3))(other) is False and asked.times == 0
