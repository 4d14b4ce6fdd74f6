"""Lists of blocks against the dense masks that they were made of."""

import pytest
import torch

from sparsecomp.errors import MaskError
from sparsecomp.reference.attention.blocks import (
    EMPTY,
    FULL,
    AttentionBlocks,
    blocks_from_map,
    blocks_of,
    dense_mask,
    pack_bits,
)


def window(q_len: int, k_len: int, reach: int) -> torch.Tensor:
    return ((torch.arange(q_len)[:, None] - torch.arange(k_len)).abs() <= reach)[None, None]


@pytest.mark.parametrize("block", [(32, 32), (64, 32), (32, 128), (128, 128)])
@pytest.mark.parametrize("shape", [(1, 1, 256, 256), (2, 3, 100, 171), (1, 2, 1, 300), (1, 1, 0, 64), (1, 1, 64, 0)])
def test_mask_comes_back(block, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.02
    mask[..., 32:64, :] = True
    mask[..., :, 64:96] = False
    assert torch.equal(dense_mask(blocks_of(mask, block)), mask)


def test_transposed_lists_are_those_of_the_transposed_mask():
    mask = torch.rand((2, 2, 150, 70), generator=torch.Generator().manual_seed(2)) < 0.01
    mask[:, :, 64:96, 32:64] = True
    b = blocks_of(mask, (64, 32))
    turned = AttentionBlocks(
        b.k_len, b.q_len, b.block_k, b.block_q, b.k_count, b.k_partial, b.k_index, b.k_tile, b.k_bits,
        b.count, b.partial, b.index, b.tile, b.bits,
    )  # fmt: skip
    assert torch.equal(dense_mask(turned), mask.transpose(2, 3))


def test_a_window_stores_few_tiles_and_lists_partial_blocks_first():
    b = blocks_of(window(1024, 1024, 128), (64, 64))
    assert len(b.bits) == 2
    assert b.count[0, 0].tolist() == [3, 4, *[5] * 12, 4, 3]
    assert b.partial[0, 0, 5] == 2 and b.index[0, 0, 5].tolist() == [3, 7, 4, 5, 6]
    assert b.tile[0, 0, 5, 2:].tolist() == [FULL] * 3


def test_last_blocks_keep_nothing_past_the_lengths():
    b = blocks_of(torch.ones((1, 1, 40, 50), dtype=torch.bool), (32, 32))
    assert b.partial[0, 0].tolist() == [1, 2]
    assert torch.equal(dense_mask(b._replace(q_len=64, k_len=64)).sum(), torch.tensor(40 * 50))


def test_map_of_blocks():
    lower = pack_bits(torch.ones((32, 32), dtype=torch.bool).tril())[None]
    block_map = torch.tensor([[0, EMPTY], [FULL, 0]], dtype=torch.int32)[None, None]
    expected = torch.ones((1, 1, 64, 64), dtype=torch.bool).tril()
    assert torch.equal(dense_mask(blocks_from_map(block_map, lower, 64, 64, (32, 32))), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: blocks_of(torch.ones((4, 4), dtype=torch.bool)),
        lambda: blocks_of(torch.ones((1, 1, 4, 4))),
        lambda: blocks_of(torch.ones((1, 1, 4, 4), dtype=torch.bool), (16, 32)),
        lambda: blocks_of(torch.ones((1, 1, 4, 4), dtype=torch.bool), (64, 96)),
        lambda: blocks_from_map(torch.zeros((1, 1, 2, 2), dtype=torch.int32), torch.zeros((1, 32, 1)).int(), 65, 64),
        lambda: blocks_from_map(torch.zeros((1, 1, 1, 1), dtype=torch.int32), torch.zeros((1, 32, 1)).int(), 65, 64),
    ],
)
def test_what_does_not_fit(make):
    with pytest.raises(MaskError, match="need|powers"):
        make()
