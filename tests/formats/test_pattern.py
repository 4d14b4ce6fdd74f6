"""Sets of positions: every operation beside Python's own sets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsecomp.errors import FormatError, PatternError
from sparsecomp.formats import BSR, COO, CSC, CSR, NM, Pattern
from sparsecomp.tensor.sparse_tensor import SparseTensor

Positions = set[tuple[int, int]]


def pattern_of(positions: Positions, shape: tuple[int, int]) -> Pattern:
    row, col = torch.tensor([*positions] or torch.empty(0, 2).tolist(), dtype=torch.int64).reshape(-1, 2).T
    return Pattern.from_positions(row, col, shape)


def positions_of(pattern: Pattern) -> list[tuple[int, int]]:
    return list(zip(pattern.row.tolist(), pattern.col.tolist(), strict=True))


@st.composite
def two_sets(draw) -> tuple[tuple[int, int], Positions, Positions]:
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    positions = st.sets(st.tuples(st.integers(0, shape[0] - 1), st.integers(0, shape[1] - 1)))
    return shape, draw(positions), draw(positions)


@settings(max_examples=100, deadline=None)
@given(two_sets())
def test_operations_are_those_of_sets(drawn):
    shape, one, other = drawn
    a, b = pattern_of(one, shape), pattern_of(other, shape)
    everything = {(row, col) for row in range(shape[0]) for col in range(shape[1])}
    for found, expected in (
        (a | b, one | other), (a & b, one & other), (a - b, one - other), (a ^ b, one ^ other),
        (a.union(b, len(one | other)), one | other), (a.intersection(b, len(one & other)), one & other),
        (a.difference(b, len(one - other)), one - other),
        (a.symmetric_difference(b, len(one ^ other)), one ^ other),
        (a.complement(49), everything - one), (a.mT.mT, one),
    ):  # fmt: skip
        assert positions_of(found) == sorted(expected) and found.shape == shape
    assert positions_of(a.mT) == sorted((col, row) for row, col in one)
    assert (a <= b, a >= b, a == b, a.isdisjoint(b)) == (one <= other, one >= other, one == other, not one & other)
    assert a.contains(b).tolist() == [position in one for position in sorted(other)]
    places = {position: place for place, position in enumerate(sorted(one))}
    assert a.places_of(b).tolist() == [places.get(position, -1) for position in sorted(other)]
    assert (len(a), a.nnz, a.density) == (len(one), len(one), len(one) / len(everything))
    assert hash(a) == hash(pattern_of(one, shape)) and a.mask().nonzero().tolist() == [[*p] for p in sorted(one)]


def test_patterns_of_every_kind_of_matrix():
    dense = torch.tensor([[0.0, 2.0, -0.0, float("nan")], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 3.0, 0.0]])
    expected = [(0, 1), (0, 3), (2, 0), (2, 2)]
    csr = CSR.from_dense(dense)
    for stored in (dense, csr, csr.to(COO), csr.to(CSC), csr.to(NM, n=2, m=4), SparseTensor(csr)):
        assert positions_of(Pattern.of(stored)) == expected
    blocks = Pattern.of(BSR.from_dense(torch.ones(3, 3), block=(2, 2)))  # what the blocks hold beyond the shape is none
    assert blocks == Pattern.of(torch.ones(3, 3))
    zeros = CSR.from_dense(torch.ones(2, 2)).with_values(torch.zeros(4))
    assert Pattern.of(zeros).nnz == 4


def test_a_pattern_and_values_are_a_matrix_and_back():
    dense = torch.arange(6.0).reshape(2, 3)
    pattern = Pattern.of(dense)
    values = pattern.values_of(dense + 1)
    assert values.tolist() == [2, 3, 4, 5, 6]
    assert pattern.matrix(values).to_dense().tolist() == [[0, 2, 3], [4, 5, 6]]
    blocks = pattern.matrix(values, BSR, block=(1, 3))
    assert isinstance(blocks, BSR) and blocks.to_dense().tolist() == [[0, 2, 3], [4, 5, 6]]


def test_empty_and_huge_shapes():
    nothing = pattern_of(set(), (0, 5))
    assert (nothing.nnz, nothing.density, (nothing | nothing).nnz, nothing.complement(0).nnz) == (0, 1.0, 0, 0)
    huge = (2**31, 2**31)
    one, other = pattern_of({(2**31 - 1, 2**31 - 1), (0, 0)}, huge), pattern_of({(0, 0), (5, 2**31 - 1)}, huge)
    assert positions_of(one | other) == [(0, 0), (5, 2**31 - 1), (2**31 - 1, 2**31 - 1)]
    assert positions_of(one - other) == [(2**31 - 1, 2**31 - 1)] and positions_of(one & other) == [(0, 0)]
    assert positions_of(other.mT) == [(0, 0), (2**31 - 1, 5)]
    with pytest.raises(PatternError, match="2\\*\\*63 - 1 elements"):
        pattern_of({(0, 0)}, (2**32, 2**31))


def test_equal_numbers_of_another_shape_are_another_pattern():
    one, other = pattern_of({(0, 1)}, (2, 4)), pattern_of({(0, 1)}, (4, 2))
    assert one != other and one != "pattern" and {one: 1, pattern_of({(0, 1)}, (2, 4)): 2} == {one: 2}


def test_what_does_not_belong_together_is_refused():
    one, other = pattern_of({(0, 1)}, (2, 4)), pattern_of({(0, 1)}, (4, 2))
    for operation in (Pattern.union, Pattern.intersection, Pattern.difference, Pattern.contains, Pattern.__le__):
        with pytest.raises(PatternError, match="do not belong together: they need one shape and one device"):
            operation(one, other)
    with pytest.raises(PatternError, match="complement .* has 7 elements, more than the budget of 6"):
        one.complement(6)
    with pytest.raises(PatternError, match=r"tensor is \(4, 2\)"):
        one.values_of(torch.ones(4, 2))
    with pytest.raises(PatternError, match="list has no pattern"):
        Pattern.of([[1.0]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(PatternError, match="contents"):
        Pattern.of(torch.ones(2, 2, device="meta"))
    with pytest.raises(FormatError, match="row"):
        Pattern.from_positions(torch.tensor([2]), torch.tensor([0]), (2, 2))


def test_a_wrong_size_and_operands_of_other_kinds_are_refused():
    a, b = pattern_of({(0, 0), (1, 2)}, (2, 3)), pattern_of({(0, 0)}, (2, 3))
    for wrong in (1, 3):
        with pytest.raises(PatternError, match=f"nnz is {wrong}, the result has 2"):
            a.union(b, wrong)
    dense = torch.eye(3)
    for other in (dense.to_sparse(), dense.to_sparse_csr(), dense.to("meta"), [[1.0]]):
        with pytest.raises(PatternError, match="has no pattern"):
            Pattern.of(other)
    for compare in (lambda: a <= 3, lambda: a | {(0, 0)}, lambda: b <= pattern_of({(0, 0)}, (3, 3))):
        with pytest.raises(PatternError, match="do not belong together"):
            compare()


def test_fake_tensors_have_patterns_of_known_size():
    with FakeTensorMode() as mode:
        fake = Pattern(mode.from_tensor(torch.tensor([1, 4], dtype=torch.int32)), (2, 3))
        assert fake.union(fake, 2).keys.shape == fake.mT.keys.shape == (2,)
