"""One spelling for each operator: what each way to call one is read as."""

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsecomp.passes.graph.canonicalize import (
    RESHAPED,
    binding_once,
    dtype_of,
    example_of,
    has_hooks,
    numel_of,
    op_of,
    shape_of,
    target_name,
)
from sparsecomp.passes.graph.operators import spelling_of

FUNCTION, METHOD = "call_function", "call_method"
X = "x"
"""Stands for a tensor of the graph."""


def called(kind: str, target: Any, args: tuple[Any, ...] = (X,), kwargs: dict[str, Any] | None = None) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.create_node(kind, target, tuple(x if arg is X else arg for arg in args), kwargs or {})


SPELLINGS: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], tuple[str, bool, bool] | None]] = [
    # how it is called, and (name, in place, known) of what is read
    (FUNCTION, torch.add, (X, 1), {}, ("add", False, True)),
    (FUNCTION, operator.add, (X, 1), {}, ("add", False, True)),
    (FUNCTION, operator.iadd, (X, 1), {}, ("add", True, True)),
    (METHOD, "add", (X, 1), {}, ("add", False, True)),
    (METHOD, "add_", (X, 1), {}, ("add", True, True)),
    (METHOD, "__add__", (X, 1), {}, ("add", False, True)),
    (METHOD, "__iadd__", (X, 1), {}, ("add", True, True)),
    (FUNCTION, torch.Tensor.add_, (X, 1), {}, ("add", True, True)),
    (FUNCTION, torch.ops.aten.add.Tensor, (X, 1), {}, ("add", False, True)),
    (FUNCTION, torch.ops.aten.add_.Tensor, (X, 1), {}, ("add", True, True)),
    (FUNCTION, torch.ops.aten.add, (X, 1), {}, ("add", False, True)),
    (FUNCTION, operator.and_, (X, X), {}, ("bitwise_and", False, True)),
    (FUNCTION, operator.iand, (X, X), {}, ("bitwise_and", True, True)),
    (FUNCTION, operator.or_, (X, X), {}, ("bitwise_or", False, True)),
    (FUNCTION, operator.setitem, (X, 0, 1), {}, ("setitem", True, True)),
    (FUNCTION, operator.getitem, (X, 0), {}, ("getitem", False, True)),
    (FUNCTION, operator.truediv, (X, 2), {}, ("div", False, True)),
    (FUNCTION, abs, (X,), {}, ("abs", False, True)),
    (FUNCTION, torch.clip, (X, 0, 1), {}, ("clamp", False, True)),
    (FUNCTION, F.relu, (X,), {}, ("relu", False, True)),
    (FUNCTION, F.relu, (X,), {"inplace": True}, ("relu", True, True)),
    (FUNCTION, F.relu, (X, True), {}, ("relu", True, True)),
    (FUNCTION, F.relu, (X,), {"inplace": False}, ("relu", False, True)),
    (FUNCTION, F.dropout, (X, 0.5, True, True), {}, ("dropout", True, True)),
    (FUNCTION, F.unfold, (X, 2), {}, ("im2col", False, True)),
    (METHOD, "unfold", (X, 0, 2, 1), {}, ("unfold", False, True)),
    (FUNCTION, torch.add, (X, 1), {"who": 3}, ("add", False, False)),
    (FUNCTION, torch.add, (X, 1, 2, 3, 4, 5), {}, ("add", False, False)),
    (FUNCTION, torch.add, (X, 1), {"out": X}, ("add", False, True)),
    (FUNCTION, F.silu, (X,), {"inplace": True, "who": 3}, ("silu", True, False)),
    (FUNCTION, torch.fft.ifft, (X,), {}, None),
    (FUNCTION, lambda x: x, (X,), {}, None),
    ("placeholder", "y", (), {}, None),
    ("output", "output", (X,), {}, None),
    ("get_attr", "weight", (), {}, None),
]


@pytest.mark.parametrize(("kind", "target", "args", "kwargs", "expected"), SPELLINGS)
def test_a_call_is_read_as_its_operator(kind, target, args, kwargs, expected) -> None:
    op = op_of(called(kind, target, args, kwargs), {})
    if op is not None and expected is None:
        assert not op.known and op.name not in ("ifft",)
        return
    assert (None if op is None else (op.name, op.inplace, op.known)) == expected


@pytest.mark.parametrize(
    "target", [torch.masked.sum, torch.masked.mean, torch.masked.softmax, torch.fft.ifft, torch.nested.nested_tensor]
)
def test_a_name_means_torchs_operator_in_torchs_own_namespaces_only(target: Callable[..., Any]) -> None:
    op = op_of(called(FUNCTION, target))
    assert op is None or (not op.known and "." in op.name) or op.name.startswith("fft")


def test_arguments_have_names_and_defaults() -> None:
    op = op_of(called(FUNCTION, F.avg_pool2d, (X, 2), {"padding": 1}))
    assert op is not None
    assert {name: op.get(name) for name in ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")} == {
        "kernel_size": 2, "stride": None, "padding": 1, "ceil_mode": False, "count_include_pad": True,
    }  # fmt: skip
    assert op.input is op.node.all_input_nodes[0] and op.get("no such", 7) == 7


@pytest.mark.parametrize("args", [(X, 2, 3), (X, (2, 3)), (X, [2, 3]), (X, torch.Size([2, 3]))])
def test_sizes_bind_alike_one_by_one_and_as_a_tuple(args: tuple[Any, ...]) -> None:
    for name in ("view", "reshape", "expand", "repeat", "permute"):
        op = op_of(called(METHOD, name, args))
        assert op is not None and op.known and list(op.args.values())[1] == (2, 3), name


def test_an_unknown_signature_keeps_positions_and_keywords() -> None:
    op = op_of(called(FUNCTION, torch.add, (X, 1, 2, 3, 4), {"who": 3}))
    assert op is not None and not op.known
    assert list(op.args) == ["other_0", "other_1", "other_2", "other_3", "other_4", "who"]
    assert op.input is op.node.args[0] and op.get("other_1") == 1


def test_the_destination_of_out_is_no_argument() -> None:
    op = op_of(called(FUNCTION, torch.add, (X, 1), {"out": X}))
    assert op is not None and op.out is X and "out" not in op.args


LAYERS: list[tuple[Callable[[], nn.Module], str, dict[str, Any]]] = [
    (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), "conv2d", {"stride": (2, 2), "padding": (1, 1), "groups": 1}),
    (lambda: nn.Linear(2, 3, bias=False), "linear", {"bias": None}),
    (lambda: nn.ReLU(inplace=True), "relu", {"inplace": True}),
    (lambda: nn.MaxPool2d(2), "max_pool2d", {"kernel_size": 2, "stride": 2}),
    (lambda: nn.Dropout(0.3), "dropout", {"p": 0.3, "training": True}),
    (lambda: nn.Flatten(), "flatten", {"start_dim": 1, "end_dim": -1}),
]


@pytest.mark.parametrize(("make", "name", "values"), LAYERS)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_layer_is_read_as_its_function(make, name, values, by_keyword) -> None:
    layer = make()
    kwargs = {"input": X} if by_keyword else {}
    node = called("call_module", "layer", () if by_keyword else (X,), kwargs)
    op = op_of(node, {"layer": layer})
    assert op is not None and (op.name, op.module, op.step_mode) == (name, layer, "s")
    assert op.inplace == getattr(layer, "inplace", False)
    assert {key: op.get(key) for key in values} == values
    assert op.input is (X if by_keyword else node.args[0])


def test_a_layer_is_looked_up_in_the_nodes_own_module() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    (node,) = (node for node in gm.graph.nodes if node.op == "call_module")
    op = op_of(node)
    assert op is not None and op.module is gm.get_submodule("0") and op.input is node.args[0]


HOOKS = {
    "none": lambda module: None,
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "before": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "before backward": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("which", HOOKS)
def test_of_a_layer_with_hooks_nothing_is_known(which: str) -> None:
    layer = nn.Linear(2, 2)
    HOOKS[which](layer)
    assert has_hooks(layer) == (which != "none")
    assert (op_of(called("call_module", "layer"), {"layer": layer}) is None) == (which != "none")


def test_a_layer_derived_from_torchs_is_not_torchs() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    assert op_of(called("call_module", "layer"), {"layer": Own(2, 2)}) is None
    assert op_of(called("call_module", "gone"), {"layer": nn.Linear(2, 2)}) is None


@pytest.mark.parametrize(
    "step_mode,layer", [("s", "Conv2d"), ("m", "Conv2d"), ("m", "MaxPool2d"), ("m", "BatchNorm2d")]
)
def test_a_step_mode_layer_is_the_layer_it_derives_from(step_mode: str, layer: str) -> None:
    layers = pytest.importorskip("spikingjelly.activation_based.layer")
    arguments = {"Conv2d": (2, 3, 1), "MaxPool2d": (2,), "BatchNorm2d": (2,)}[layer]
    made = getattr(layers, layer)(*arguments, step_mode=step_mode)
    op = op_of(called("call_module", "layer"), {"layer": made})
    assert op is not None and op.step_mode == step_mode
    assert op.name == {"Conv2d": "conv2d", "MaxPool2d": "max_pool2d", "BatchNorm2d": "batch_norm"}[layer]


@pytest.mark.parametrize(
    "raw,expected",
    [("relu_", ("relu", True)), ("__and__", ("bitwise_and", False)), ("__iand__", ("bitwise_and", True)),
     ("__ixor__", ("bitwise_xor", True)),
     ("and_", ("bitwise_and", False)), ("or_", ("bitwise_or", False)), ("mm", ("matmul", False)),
     ("swapaxes_", ("transpose", True)), ("lib::op_", ("lib::op_", False)), ("setitem", ("setitem", True))],
)  # fmt: skip
def test_names(raw: str, expected: tuple[str, bool]) -> None:
    assert spelling_of(raw) == expected


def test_what_a_node_is_known_to_be() -> None:
    node = called(FUNCTION, torch.neg)
    assert example_of(node) is shape_of(node) is dtype_of(node) is numel_of(node) is None
    node.meta["example_value"] = torch.zeros(2, 3, dtype=torch.float16)
    assert (shape_of(node), dtype_of(node), numel_of(node)) == ((2, 3), torch.float16, 6)
    node.meta["example_value"] = (torch.zeros(2), torch.zeros(2))
    assert shape_of(node) is None, "a tuple has no shape"
    node.meta["val"] = torch.zeros(())
    assert (shape_of(node), numel_of(node)) == ((), 1)
    node.meta[RESHAPED] = True
    assert example_of(node) is None
    assert shape_of(torch.zeros(0, 4)) == (0, 4) and numel_of(torch.zeros(0, 4)) == 0 and example_of(3) is None


def test_a_call_is_bound_once_and_anew_when_it_changed():
    node = called(FUNCTION, torch.add, (X, 1))
    other = node.graph.placeholder("other")
    with binding_once():
        first = op_of(node)
        assert first is not None and op_of(node) is first
        node.replace_input_with(node.all_input_nodes[0], other)
        second = op_of(node)
        assert second is not None and second.input is other and op_of(node) is second
        node.kwargs = {"alpha": 2}
        third = op_of(node)
        assert third is not None and third.get("alpha") == 2
        node.target = torch.sub
        assert (fourth := op_of(node)) is not None and fourth.name == "sub"
    assert op_of(node) is not fourth


def test_only_what_torch_and_python_made_has_a_name() -> None:
    class Odd:
        """Something that can be called, with a name, a module and a class that it belongs to, or without."""

        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(attributes)

        def __call__(self) -> None: ...

    def name(**attributes: Any) -> str | None:
        return target_name(cast(fx.Node, SimpleNamespace(op=FUNCTION, target=Odd(**attributes))))

    assert name(__name__="mul", __module__="torch") == "mul"
    assert name(__name__="mul", __module__="torch.special") == "torch.special.mul"
    assert name(__name__="mul", __module__="numpy") is None
    assert name(__name__="mul", __module__=None) is None
    assert name(__name__="mul", __module__=None, __objclass__=torch.Tensor) == "mul"
    assert name(__name__="mul", __module__=None, __objclass__="Tensor") is None
    assert name(__module__="torch") is None
