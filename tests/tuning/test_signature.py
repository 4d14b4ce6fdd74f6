"""Buckets by hand, and what does and does not share a tuning result."""

from dataclasses import replace

import pytest
import sympy
import torch

from sparsecomp import _compat
from sparsecomp.errors import SignatureError
from sparsecomp.lowering.cache.signature import Device, KernelSignature, Rows, density_bucket, row_bucket, size_bucket

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
CONV = KernelSignature(
    "binary_conv", H100, dtypes=("int8", "float32"), accumulator="int32", layouts=("nhwc",),
    sizes=(("n", 100), ("h", 56)), parameters=(("c", 64), ("r", 3)), density=0.12,
)  # fmt: skip


@pytest.mark.parametrize(("size", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (2**40 + 1, 2**41)])
def test_sizes_fall_into_powers_of_two(size, bucket):
    assert size_bucket(size) == bucket


@pytest.mark.parametrize(
    ("density", "bucket"),
    [(None, "unknown"), (0.0, "0"), (1.0, "2^0"), (0.5, "2^-1"), (0.51, "2^0"), (0.12, "2^-3"), (1e-9, "2^-16")],
)
def test_densities_fall_into_factors_of_two(density, bucket):
    assert density_bucket(density) == bucket


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [
        (None, "unknown"), (Rows(33.0, 0.1), "64 even"), (Rows(64, 0.5), "64 mixed"), (Rows(3, 2), "4 skewed"),
        (Rows(3, 15.9), "4 skewed"), (Rows(3, 16), "4 extreme"),
    ],
)  # fmt: skip
def test_rows_are_even_mixed_skewed_or_extreme(rows, bucket):
    assert row_bucket(rows) == bucket


def test_what_lies_in_one_bucket_shares_a_key_and_nothing_else_does():
    assert replace(CONV, sizes=(("n", 128), ("h", 64)), density=0.1).key == CONV.key
    others = [
        replace(CONV, op="lif"), replace(CONV, device=replace(H100, name="NVIDIA A100")),
        replace(CONV, device=replace(H100, triton="3.9.0")), replace(CONV, dtypes=("int8", "float16")),
        replace(CONV, accumulator="float32"), replace(CONV, formats=("csr",)), replace(CONV, index="int32"),
        replace(CONV, layouts=("nchw",)), replace(CONV, epilogue="bias"), replace(CONV, sizes=(("n", 129), ("h", 56))),
        replace(CONV, parameters=(("c", 65), ("r", 3))), replace(CONV, density=0.3), replace(CONV, rows=Rows(3, 0)),
    ]  # fmt: skip
    assert len({signature.key for signature in [CONV, *others]}) == 1 + len(others)


def test_the_fields_say_what_is_in_the_key():
    assert dict(CONV.fields) == {
        "accumulator": "int32", "capability": "9.0", "density": "2^-3", "dtypes": "int8,float32", "epilogue": "",
        "formats": "", "gpu": "NVIDIA H100 80GB HBM3", "index": "", "layouts": "nhwc", "op": "binary_conv",
        "parameter.c": "64", "parameter.r": "3", "rows": "unknown", "size.h": "64", "size.n": "128", "triton": "3.6.0",
    }  # fmt: skip


def test_a_symbolic_size_is_bound_before_it_has_a_bucket():
    batch = sympy.Symbol("s0", integer=True, positive=True)
    dynamic = replace(CONV, sizes=(("n", 4 * batch), ("h", 56)))
    with pytest.raises(SignatureError, match="symbolic"):
        _ = dynamic.key
    assert dynamic.bind({"s0": 25}).key == CONV.key
    assert dynamic.bind({"s0": 100}).fields["size.n"] == "512"
    assert dict(dynamic.bind({"s1": 2}).sizes)["n"] == 4 * batch


def test_symbolic_sizes_come_from_dynamo():
    seen = []

    def backend(gm, inputs):
        value = next(node for node in gm.graph.nodes if node.op == "call_function").meta["example_value"]
        seen.extend(_compat.size_expression(size) for size in value.shape)
        return gm.forward

    torch.compile(lambda x: torch.cat([x, x]), backend=backend, dynamic=True)(torch.ones(6, 5))
    rows, columns = seen
    (symbol,) = rows.free_symbols
    assert rows == 2 * symbol and columns.free_symbols
    signature = KernelSignature("op", H100, sizes=(("rows", rows),))
    assert signature.bind({str(symbol): 100}).fields["size.rows"] == "256"
    assert _compat.size_expression(7) == 7


@pytest.mark.parametrize("bad", [{"density": 1.5}, {"density": float("nan")}, {"sizes": (("n", -1),)}])
def test_what_no_call_can_have_is_refused(bad):
    with pytest.raises(SignatureError, match="is not in|negative"):
        _ = replace(CONV, **bad).key
