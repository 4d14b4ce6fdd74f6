"""Patterns against their definitions, pair by pair in plain Python, and in each of their forms."""

from collections.abc import Callable
from itertools import product

import pytest
import torch

from sparsecomp._compat import FakeTensorMode, is_fake
from sparsecomp.attention import (
    AttentionPattern,
    Documents,
    FromFunction,
    FromTensor,
    GlobalTokens,
    InBlocks,
    LocalWindow,
    PerHead,
    PeriodicKeys,
    PrefixLM,
    RandomKeys,
    big_bird,
    blocks_of,
    causal,
    dense_mask,
    longformer,
    random_blocks,
    sparse_transformer_fixed,
    sparse_transformer_strided,
)
from sparsecomp.errors import MaskError, PatternError
from sparsecomp.formats import BSR, CSR

IDS = [0, 0, 0, 1, 1, 2, -1, 2, 2, 0] * 10
LENGTHS = [7, 0, 30, 1, 12]


def documents(q: int, k: int, ids: list[int]) -> bool:
    return ids[q] == ids[k] and ids[q] >= 0


def packed(q: int, k: int) -> bool:
    ids = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    return max(q, k) < len(ids) and ids[q] == ids[k]


CASES: dict[str, tuple[AttentionPattern, Callable[[int, int], bool]]] = {
    "causal": (causal(), lambda q, k: k <= q),
    "window": (LocalWindow(5, 9), lambda q, k: -9 <= q - k <= 5),
    "one sided": (LocalWindow(33, 0), lambda q, k: 0 <= q - k <= 33),
    "ahead": (LocalWindow(0, None), lambda q, k: k >= q),
    "itself": (LocalWindow(0, 0), lambda q, k: q == k),
    "dilated": (LocalWindow(4, 2, 3), lambda q, k: -6 <= q - k <= 12 and (q - k) % 3 == 0),
    "first tokens": (GlobalTokens(3), lambda q, k: q < 3 or k < 3),
    "some tokens": (GlobalTokens((1, 40, 41)), lambda q, k: bool({q, k} & {1, 40, 41})),
    "global keys": (GlobalTokens((0, 5), as_queries=False), lambda q, k: k in (0, 5)),
    "global queries": (GlobalTokens(2, as_keys=False), lambda q, k: q < 2),
    "prefix": (PrefixLM(10), lambda q, k: k < 10 or k <= q),
    "periodic": (PeriodicKeys(8, 2), lambda q, k: k % 8 in (6, 7)),
    "in blocks": (InBlocks(LocalWindow(1, 0), 6), lambda q, k: q // 6 - k // 6 in (0, 1)),
    "in oblong blocks": (InBlocks(causal(), (4, 10)), lambda q, k: k // 10 <= q // 4),
    "documents": (Documents(torch.tensor(IDS)), lambda q, k: documents(q, k, IDS)),
    "packed": (Documents.of_lengths(LENGTHS, 100), packed),
    "function": (FromFunction(lambda b, h, q, k: (q * k) % 7 < 2), lambda q, k: (q * k) % 7 < 2),
    "both": (causal() & LocalWindow(8, 8), lambda q, k: 0 <= q - k <= 8),
    "either": (LocalWindow(2, 2) | GlobalTokens(1), lambda q, k: abs(q - k) <= 2 or not q or not k),
    "not": (~(LocalWindow(2, 2) | GlobalTokens(1)), lambda q, k: abs(q - k) > 2 and bool(q) and bool(k)),
    "shifted": (LocalWindow(12, 0).shifted(20), lambda q, k: 0 <= q + 20 - k <= 12),
    "longformer": (longformer(6, (2,)), lambda q, k: abs(q - k) <= 6 or 2 in (q, k)),
    "longformer, causal": (
        longformer(3, 1, 2, autoregressive=True),
        lambda q, k: (0 <= q - k <= 6 and (q - k) % 2 == 0) or k == 0,
    ),
    "strided": (sparse_transformer_strided(8), lambda q, k: 0 <= q - k <= 8 or (q >= k and (q - k) % 8 == 0)),
    "fixed": (sparse_transformer_fixed(8, 2), lambda q, k: k <= q and (q // 8 == k // 8 or k % 8 >= 6)),
}  # fmt: skip
SIZES = [(64, 64), (70, 100), (100, 33), (1, 100)]


def kept_in_loops(keeps: Callable[[int, int], bool], q_len: int, k_len: int) -> torch.Tensor:
    return torch.tensor([[keeps(q, k) for k in range(k_len)] for q in range(q_len)]).view(1, 1, q_len, k_len)


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", SIZES)
def test_a_pattern_keeps_what_its_definition_says(name: str, lengths: tuple[int, int]) -> None:
    pattern, keeps = CASES[name]
    expected = kept_in_loops(keeps, *lengths)
    assert torch.equal(pattern.to_dense(*lengths), expected)
    for block in ((32, 32), (64, 32)):
        blocks, direct = pattern.to_blocks(*lengths, block), blocks_of(expected, block)
        assert torch.equal(dense_mask(blocks), expected)
        # no block is listed in vain, none that is full as a partial one, and no tile is there twice
        assert torch.equal(blocks.count, direct.count) and torch.equal(blocks.partial, direct.partial)
        assert blocks.bits.shape == direct.bits.shape


def test_bounds_leave_few_blocks_open() -> None:
    """A window's interior is looked at by blocks alone: the pairs asked for grow with its length, not its square."""
    asked = []

    class Watched(LocalWindow):
        def keeps(self, pairs):
            kept = super().keeps(pairs)
            asked.append(kept.numel())
            return kept

    pattern = Watched(300, 0) & ~Watched(10, 0) | Watched(0, 0)
    blocks = pattern.to_blocks(16384, block=(128, 128))
    assert sum(asked) < 128 * 128 * 128 * 20
    assert int(blocks.count.sum()) < 128 * 5


def test_random_blocks_are_as_many_and_the_same_again() -> None:
    pattern = random_blocks(3, 16, seed=5)
    mask = pattern.to_dense(160, 128)[0, 0]
    cells = mask.view(10, 16, 8, 16).transpose(1, 2)
    assert torch.equal(cells.flatten(2).all(2), cells.flatten(2).any(2))
    assert cells.flatten(2).any(2).sum(1).tolist() == [3] * 10
    assert torch.equal(mask, random_blocks(3, 16, seed=5).to_dense(160, 128)[0, 0])
    assert not torch.equal(mask, random_blocks(3, 16, seed=6).to_dense(160, 128)[0, 0])
    assert torch.equal(dense_mask(pattern.to_blocks(160, 128, (32, 32)))[0, 0], mask)


def test_random_keys_of_heads_differ_and_of_few_keys_are_all() -> None:
    mask = RandomKeys(4, heads=3).to_dense(40, 50)
    assert mask.shape == (1, 3, 40, 50) and mask.sum(-1).eq(4).all()
    assert not torch.equal(mask[0, 0], mask[0, 1])
    assert RandomKeys(9).to_dense(5, 4).all()


def test_keys_that_were_drawn_among_fakes_are_those_of_all_calls() -> None:
    pattern = RandomKeys(3, seed=71)
    with FakeTensorMode(allow_non_fake_inputs=True):
        pattern.to_dense(50)
    found = pattern.to_dense(50)
    assert not is_fake(found) and torch.equal(found.sum(-1), torch.full((1, 1, 50), 3))


def test_big_bird_is_window_and_global_and_random_blocks() -> None:
    mask = big_bird(block=8, window=3, global_blocks=1, random=2, seed=1).to_dense(80)[0, 0]
    cells = mask.view(10, 8, 10, 8)[:, 0, :, 0]
    for row, column in product(range(10), range(10)):
        if abs(row - column) <= 1 or not row or not column:
            assert cells[row, column]
    assert cells[4:].sum(1).max() <= 6 and cells[1:].sum() > 10 * 3


def test_batch_entries_and_heads_may_differ() -> None:
    ids = torch.tensor([[0] * 20 + [1] * 44, [0] * 50 + [1] * 14])
    pattern = Documents(ids) & PerHead((causal(), LocalWindow(3, 3), LocalWindow(0, None)))
    mask = pattern.to_dense(64)
    assert mask.shape == (2, 3, 64, 64)
    rules = (lambda q, k: k <= q, lambda q, k: abs(q - k) <= 3, lambda q, k: k >= q)
    for batch, head in product(range(2), range(3)):
        row = ids[batch].tolist()
        expected = kept_in_loops(lambda q, k, row=row, head=head: row[q] == row[k] and rules[head](q, k), 64, 64)
        assert torch.equal(mask[batch, head], expected[0, 0])
    assert torch.equal(dense_mask(pattern.to_blocks(64, block=(32, 32))), mask)
    prefixes = PrefixLM((3, 9)).to_dense(12)
    assert [int(prefixes[batch, 0, 0].sum()) for batch in range(2)] == [3, 9]


@pytest.mark.parametrize("shape", [(40, 70), (3, 40, 70), (2, 1, 40, 70), (2, 3, 40, 70)])
def test_a_tensor_is_taken_as_it_is(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.3
    pattern = FromTensor(mask)
    before = mask.clone()
    mask.fill_(False)  # the pattern's is a copy
    expected = before.view((1,) * (4 - len(shape)) + shape)
    assert torch.equal(pattern.to_dense(40, 70), expected)
    assert torch.equal(dense_mask(pattern.to_blocks(40, 70, (32, 64))), expected)


def test_a_matrix_and_blocks_come_back() -> None:
    pattern = longformer(9, 2)
    mask = pattern.to_dense(70, 50)[0, 0]
    matrix = pattern.to_bsr(70, 50, (32, 32), torch.float16)
    assert isinstance(matrix, BSR) and matrix.dtype is torch.float16 and matrix.shape == (70, 50)
    assert torch.equal(matrix.to_dense(), mask.half())
    matrix.to(CSR).compact()  # its arrays are in order
    again = FromTensor.of_matrix(BSR.from_dense(mask.float(), block=16))
    assert torch.equal(again.to_dense(70, 50)[0, 0], mask)
    assert torch.equal(FromTensor.of_blocks(pattern.to_blocks(70, 50)).to_dense(70, 50)[0, 0], mask)


def test_equal_numbers_make_equal_patterns() -> None:
    assert LocalWindow(3, 0) | GlobalTokens((1, 2)) == LocalWindow(3, 0) | GlobalTokens((1, 2))
    assert hash(big_bird()) == hash(big_bird())
    assert LocalWindow(3, 0) & causal() != LocalWindow(3, 0) | causal()
    mask = torch.ones(4, 4, dtype=torch.bool)
    assert FromTensor(mask) != FromTensor(mask)


def test_nothing_to_attend_to() -> None:
    for lengths in ((0, 5), (5, 0), (0, 0)):
        assert causal().to_dense(*lengths).shape == (1, 1, *lengths)
        assert dense_mask(causal().to_blocks(*lengths)).shape == (1, 1, *lengths)
    assert not dense_mask((~LocalWindow(None, None)).to_blocks(40)).any()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: LocalWindow(-1, 0), "before is -1"),
        (lambda: LocalWindow(1, 0, 0), "dilation is 0"),
        (lambda: LocalWindow(1.5, 0), "before is 1.5"),
        (lambda: GlobalTokens((3, 1)), "ascending"),
        (lambda: PrefixLM(()), "prefix"),
        (lambda: PeriodicKeys(4, 5), "count is 5"),
        (lambda: RandomKeys(0), "count is 0"),
        (lambda: InBlocks(causal(), 0), "block is 0"),
        (lambda: InBlocks(causal(), (1, 2, 3)), "block is"),
        (lambda: FromTensor(torch.ones(4, 4)), "torch.bool"),
        (lambda: FromFunction(3), "no function"),
        (lambda: Documents(torch.ones(4)), "whole numbers"),
        (lambda: Documents.of_lengths([5, 6], 10), "do not fit"),
        (lambda: PerHead(()), "one or more"),
        (lambda: PerHead((PerHead((causal(), causal())),)), "single head"),
        (lambda: causal() & torch.ones(2, 2, dtype=torch.bool), "wrap a mask in FromTensor"),
        (lambda: FromTensor(torch.ones(4, 4, dtype=torch.bool)).to_dense(5, 4), "4 queries and 4 keys"),
        (lambda: Documents(torch.zeros(4, dtype=torch.int64)).to_blocks(5), "4 tokens"),
        (lambda: FromFunction(lambda b, h, q, k: q - k).to_dense(4), "torch.bool"),
        (lambda: FromFunction(lambda b, h, q, k: (q == k)[..., :2]).to_dense(4), "element by element"),
        (lambda: (PrefixLM((1, 2)) & PrefixLM((1, 2, 3))).to_dense(4), "do not go together"),
        (lambda: causal().to_dense(-1), "q_len is -1"),
        (lambda: causal().shifted(-1), "by is -1"),
        (lambda: PrefixLM((1, 2)).to_bsr(4), "apart"),
        (lambda: causal().spy(8, width=0), "width is 0"),
        (lambda: PrefixLM((1, 2)).spy(8, batch=2), "no (batch, head)"),
    ],
)  # fmt: skip
def test_what_is_no_pattern_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(PatternError) as raised:
        make()
    assert told in str(raised.value)


def test_an_impossible_block_is_refused() -> None:
    for block in ((0, 32), (48, 32), (32, 16)):
        with pytest.raises(MaskError, match="powers of two"):
            causal().to_blocks(64, block=block)


def test_a_picture_in_text() -> None:
    lines = causal().spy(8, width=8).splitlines()
    assert lines[0] == "+--------+" and len(lines) == 4 + 2
    assert lines[1] == "|@+      |" and lines[4] == "|@@@@@@@+|"  # of two rows and one column each
    long = LocalWindow(64, 0).spy(4096, width=32).splitlines()
    assert len(long) == 16 + 2
    assert [line.strip("|").strip() != "" for line in long[1:-1]] == [True] * 16
    assert all(line.count(" ") >= 29 for line in long[1:-1])


def test_a_picture_as_a_file(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    for pattern in (causal(), PrefixLM((1, 40))):
        path = tmp_path / "pattern.png"
        assert pattern.spy(100, path=path, batch=0) is None
        assert path.stat().st_size > 1000


def test_statistics() -> None:
    found = causal().statistics(256, block=(64, 64))
    assert found.pairs == 257 / 512
    assert (found.full, found.partial, found.empty) == (6 / 16, 4 / 16, 6 / 16)
    assert (found.tiles, found.shortest, found.longest) == (1, 1, 4)
    assert "50.20% of pairs" in str(found)
    ragged = LocalWindow(None, None).statistics(65, 33, (32, 32))
    assert ragged.pairs == 1 and (ragged.full, ragged.partial) == (2 / 6, 4 / 6)
    assert causal().statistics(0).pairs == 0
