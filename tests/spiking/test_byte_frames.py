"""Sums of bytes over time are made as the maps that layers read, and no layer gets a copy of one."""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from multi_step import block, images, lif, lively
from test_fuse_residual import JOINS, Block
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from sparsecomp.compiler.capture import Graph
from sparsecomp.options import Options
from sparsecomp.passes.spiking.byte_frames import sum_maps

OPTIONS = {"implementation": "binary", "neurons": "fuse", "disable": ("fuse_residual",)}


def in_maps() -> Tensor:
    x = images()
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])


def network(join: str, blocks: int, x: Tensor) -> nn.Module:
    model = nn.Sequential(*block(3, 16, lif), *(Block(JOINS[join][0], 16, 16) for _ in range(blocks)))
    return lively(model, x).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("join", ["add", "and", "iand", "in place"])
def test_sums_are_of_maps_and_bits_are_those_of_eager(join):
    x = in_maps()
    eager, model = (network(join, 3, x) for _ in range(2))
    parsed, made = Options.parse(None, OPTIONS), []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        assert Graph.of_dynamo(gm, example_inputs, {}, parsed).rewrite(parsed).changed
        sum_maps(gm)
        gm.recompile()
        made.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend)(x), eager(x))
    code = made[0].code
    # each sum is read by the next layer, and by the next sum, as it was made
    assert code.count("torch.unflatten(") >= 3
    flattened = set(re.findall(r"= torch\.flatten\((\w+),", code)) | set(re.findall(r"= (\w+)\.flatten\(", code))
    assert not flattened & set(re.findall(r"(\w+) = torch\.unflatten\(", code))


@pytest.mark.slow(reason="Inductor compiles a deep network")
def test_no_layer_gets_a_copy():
    """With six blocks Inductor keeps sums, which the next layers read."""
    x = in_maps()
    eager, model = (network("add", 6, x) for _ in range(2))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="sparsecomp", options=OPTIONS)
        found, (code,) = run_and_get_code(compiled, x)
        assert torch.equal(found, eager(x))
    # a copy for a layer is named after its operator
    assert len(re.findall(r"direct_cpu\(", code)) == 13 and not re.findall(r"cpp_fused_\w*conv_lif\w*\(", code)


def bytes_over_time(shape: tuple[int, ...], channels_last: bool = True) -> Tensor:
    x = torch.randint(0, 3, shape, dtype=torch.int8)
    x = x.flatten(0, 1)
    return (x.contiguous(memory_format=torch.channels_last) if channels_last else x).unflatten(0, shape[:2])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (bytes_over_time((2, 3, 4, 5, 5)), bytes_over_time((2, 3, 4, 5, 5), False)),
        (bytes_over_time((2, 3, 4, 5, 5), False), bytes_over_time((2, 3, 4, 5, 5), False)),
        (bytes_over_time((2, 3, 4, 5, 5)), bytes_over_time((2, 3, 4, 5, 5))[:1]),
        (bytes_over_time((2, 3, 4, 5, 5)).transpose(0, 1), bytes_over_time((2, 3, 4, 5, 5)).transpose(0, 1)),
        (bytes_over_time((2, 3, 4, 5, 5)).float(), bytes_over_time((2, 3, 4, 5, 5)).float()),
    ],
    ids=["one contiguous", "contiguous", "broadcast", "steps inside", "floats"],
)
def test_others_stay_as_they_are(a, b):
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    added = graph.call_function(operator.add, (left, right))
    graph.output(added)
    gm = fx.GraphModule({}, graph)
    for node, value in ((left, a), (right, b), (added, a + b)):
        node.meta["example_value"] = value
    before = str(graph)
    sum_maps(gm)
    assert str(graph) == before
