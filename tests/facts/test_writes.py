"""Which calls may write to what they are given, against torch's own schemas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from sparsecomp.passes.graph.canonicalize import op_of
from sparsecomp.passes.graph.writes import also_written, is_functional, may_write

LIBRARY = torch.library.Library("sparsecomp_writes_test", "DEF")
for schema in ("reads(Tensor x) -> Tensor", "writes(Tensor x, Tensor(a!) y) -> Tensor"):
    LIBRARY.define(schema)


def _aten() -> list[str]:
    every = {name[6:].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    return sorted(name for name in every if not name.endswith("_"))  # what is in place is read as such


def _changes_a_tensor(schema: Any) -> bool:
    of_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return schema.is_mutable and of_tensors and not any(argument.is_out for argument in schema.arguments)


def test_what_torchs_schemas_say():
    names = _aten()
    packets = {name: getattr(torch.ops.aten, name, None) for name in names}
    schemas = {
        name: [getattr(packet, overload)._schema for overload in packet.overloads()]
        for name, packet in packets.items() if packet is not None and name.isidentifier()
    }  # fmt: skip
    unsaid = ("batch_norm", "instance_norm", "embedding_bag")
    expected = {
        name for name, found in schemas.items()
        if not any(map(_changes_a_tensor, found)) and not any(part in name for part in unsaid)
    }  # fmt: skip
    assert len(expected) > 1000 and len(schemas.keys() - expected) > 20
    found = {name for name in schemas if is_functional(name)}
    assert found - expected <= {"sort"}  # one overload sorts a list
    # their overloads with `out` write to another argument, too
    assert expected - found <= {"_amp_update_scale", "_amp_foreach_non_finite_check_and_unscale"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tolist", True), ("not", True), ("__bool__", True),  # without a schema
        ("numpy", False), ("apply", False), ("share_memory", False), ("some_function", False), ("no identifier", False),
        ("normalize", True), ("gumbel_softmax", True),  # of torch.nn.functional
        ("torch._C._nn.gelu", True), ("torch._C._fft.fft_ifft", True), ("torch._C._nn.some_function", False),
        ("torch._C._nn.batch_norm", False), ("batch_norm", False), ("sync_batch_norm", False), ("instance_norm", False),
        ("embedding_bag", False), ("add_", False), ("copy_", False), ("relu_", False), ("embedding_renorm_", False),
    ],
)  # fmt: skip
def test_names(name, expected):
    assert is_functional(name) is expected


def _op(target: Any, *arguments: Any, kind: str = "call_function", **named: Any):
    """The call on placeholders for each "x", "y", …"""
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in "xyz"}

    def placed(value: Any) -> Any:
        return given.get(value, value) if isinstance(value, str) else value

    node = graph.create_node(kind, target, tuple(map(placed, arguments)), {k: placed(v) for k, v in named.items()})
    op = op_of(node)
    assert op is not None
    return op


OURS = torch.ops.sparsecomp_writes_test
CALLS = {
    "a function": (_op(torch.fft.ifft, "x"), False, False),
    "a method": (_op("kthvalue", "x", 1, kind="call_method"), False, False),
    "a flag by position, which may be `inplace`": (_op(torch.kthvalue, "x", 1, 0, True), False, True),
    "another flag": (_op(torch.kthvalue, "x", 1, 0, False), False, False),
    "a number": (_op(torch.kthvalue, "x", 1, 1), False, False),
    "a table's norm": (_op(torch.renorm, "x", 2, 0, max_norm=1.0), False, True),
    "no norm": (_op(torch.renorm, "x", 2, 0, max_norm=None), False, False),
    "an unknown function": (_op("apply", "x", kind="call_method"), False, True),
    "a known function": (_op(torch.relu, "x"), True, False),
    "a known one with a flag": (_op(F.batch_norm, "x", "y", "z", None, None, True), True, False),
    "a custom one that reads": (_op(OURS.reads.default, "x"), False, False),
    "a custom one that writes": (_op(OURS.writes.default, "x", "y"), False, True),
    "a known custom one that writes": (_op(OURS.writes.default, "x", "y"), True, False),
    "a packet, which has no schema": (_op(OURS.reads, "x"), False, True),
    "a known packet": (_op(OURS.reads, "x"), True, False),
    "a body": (_op(torch.ops.higher_order.cond, "x"), False, True),
    "a body that is known": (_op(torch.ops.higher_order.cond, "x"), True, True),
}


@pytest.mark.parametrize(("op", "known", "expected"), CALLS.values(), ids=CALLS)
def test_calls(op, known, expected):
    assert may_write(op, known) is expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (_op(F.batch_norm, "x", "y", "z", training=True), ["y", "z"]),
        (_op(F.batch_norm, "x", "y", "z", training=False), []),
        (_op(F.batch_norm, "x", "y", "z"), []),
        (_op(F.batch_norm, "x", None, "z", None, None, True), ["z"]),
        (_op(F.instance_norm, "x", "y", "z"), ["y", "z"]),
        (_op(F.instance_norm, "x", "y", "z", use_input_stats=False), []),
        (_op(F.embedding, "x", "y", max_norm=1.0), ["y"]),
        (_op(F.embedding, "x", "y", None, 0.0), ["y"]),
        (_op(F.embedding, "x", "y"), []),
        (_op(F.relu, "x"), []),
    ],
)
def test_statistics_and_tables_that_a_call_updates(op, expected):
    assert [node.name for node in also_written(op)] == expected
