"""What a user lets float32 products be is read from whichever of torch's settings said it."""

from collections.abc import Callable

import pytest
import torch

from sparsecomp import _compat


def _all_tf32() -> None:
    torch.backends.fp32_precision = "tf32"


def _all_exact() -> None:
    torch.backends.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "ieee"


def _products_by_their_old_name() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def _convolutions_by_their_old_name() -> None:
    torch.backends.cudnn.allow_tf32 = False


def _everything_high() -> None:
    torch.set_float32_matmul_precision("high")


# product and convolution; torch's default is exact products and convolutions in TF32
_SETTINGS: list[tuple[Callable[[], None], bool, bool]] = [
    (lambda: None, False, True),
    (_all_tf32, True, True),
    (_all_exact, False, False),
    (_products_by_their_old_name, True, True),
    (_convolutions_by_their_old_name, False, False),
    (_everything_high, True, True),
]


@pytest.mark.parametrize(("say", "matmul", "conv"), _SETTINGS)
def test_every_way_to_say_it(say, matmul, conv):
    say()
    assert (_compat.matmul_tf32(), _compat.conv_tf32()) == (matmul, conv)


def test_no_test_leaves_it_to_the_next():
    """The fixture of all tests; the cases above have run before."""
    assert (_compat.matmul_tf32(), _compat.conv_tf32()) == (False, True)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, True)
