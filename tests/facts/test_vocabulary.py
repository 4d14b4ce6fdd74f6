"""Every operator the analysis knows, against torch's own schemas: argument order, keywords, defaults, writes, aliases.

An operator is reached by several spellings (`torch.f`, `torch.nn.functional.f`, `Tensor.f`, `torch.ops.aten.f`,
`operator.f`), whose arguments can stand in different orders. Arguments given by position must be read as the same
arguments given by the schema's names. A spelling that the vocabulary does not understand is fine: nothing is claimed
of it. An operator none of whose spellings is checked is not.
"""

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.facts.registry import TRANSFERS
from sparsecomp.passes.graph import canonicalize
from sparsecomp.passes.graph.canonicalize import CanonicalOp, op_of
from sparsecomp.passes.graph.layers import MODULE_OPS
from sparsecomp.passes.graph.operators import OPERATORS, VALUELESS, Trait, spelled_as, spelling_of
from sparsecomp.passes.masked.formula import LAYERS

SIGNATURES = {name: record.signature for name, record in OPERATORS.items() if record.signature is not None}
VOCABULARY = sorted({name for name in TRANSFERS if "::" not in name} | set(SIGNATURES))
_TENSOR_ALONE = ("bfloat16", "bool", "byte", "char", "cpu", "cuda", "double", "float", "half", "int", "long", "short")
CHECKED_BY_HAND = {
    **dict.fromkeys(_TENSOR_ALONE, "methods that take the tensor, and where its copy is laid"),
    "identity": "nn.Identity is no function",
    "T": "an attribute", "mT": "an attribute",
    "getattr": "getattr(tensor, name)", "getitem": "tensor[index]", "setitem": "tensor[index] = value",
    "to": "reads dtype, device and tensor by their types", "type": "a dtype or its name",
}  # fmt: skip

GIVES_INDICES = {"aten.aten::repeat_interleave.Tensor", "torch.repeat_interleave: Tensor"}
"""Spellings whose only argument is read under another name, from which the transfer function tells that they are."""
NOT_TAGGED = {
    **dict.fromkeys(("repeat_interleave", "tril", "triu"), "parts of a tensor, or their copies"),
    **dict.fromkeys(("floor_divide", "softsign", "log_sigmoid"), "made of operators that are"),
    "leaky_relu": "not in torch 2.11",
}  # fmt: skip
"""Elementwise operators without torch's tag."""
OTHER_DEFAULTS = {
    **{f"{form}conv{rank}d{end} padding": "'valid' is no padding"
       for rank in (1, 2, 3) for form, end in (("aten.aten::", ".padding"), ("torch.", ": padding"))},
    **{f"{form} p": "nothing reads it, and other spellings have no default"
       for form in ("aten.aten::bernoulli_.float", "Tensor.bernoulli_: float", "torch.Tensor.bernoulli_: float")},
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One parameter of one spelling."""

    name: str
    keyword_only: bool = False
    default: Any = inspect.Parameter.empty
    written: bool = False


@dataclass(frozen=True)
class Spelling:
    """One way to call an operator, and what torch says about its parameters."""

    text: str
    op: str
    target: Any
    parameters: tuple[Parameter, ...]
    aliases: bool = False

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CanonicalOp:
        graph = fx.Graph()
        found = op_of(graph.create_node(self.op, self.target, args, kwargs))
        assert found is not None
        return found

    def name(self) -> str:
        return self.call(("x",), {}).name


def _overloads(raw: str) -> Iterator[tuple[Any, Any]]:
    packet = getattr(torch.ops.aten, raw, None) if not raw.startswith("__") else None
    for name in packet.overloads() if packet is not None else ():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        # TorchScript's own overloads for numbers, lists and dictionaries are no operators on tensors
        on_tensors = any(str(one.type) in ("Tensor", "List[Tensor]") for one in overload._schema.returns)
        # the overload of torch 2.11 for named dimensions, which Dynamo does not trace
        named = any(one.name == "dims" and str(one.type) == "List[str]" for one in arguments)
        if on_tensors and not named and not any(argument.is_out for argument in arguments):
            yield overload, overload._schema


def _of_schema(schema: Any) -> tuple[Parameter, ...]:
    def parameter(argument: Any) -> Parameter:
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        written = argument.alias_info is not None and argument.alias_info.is_write
        return Parameter(argument.name, argument.kwarg_only, default, written)

    return tuple(map(parameter, schema.arguments))


def _is_view(schema: Any) -> bool:
    infos = [one.alias_info for one in schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _of_python(function: Callable[..., Any]) -> tuple[Parameter, ...] | None:
    """The parameters of a function in Python; of one that dispatches by a flag, those of what it dispatches to."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # a method in C under the name of a function in Python
        return None
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in found):
        inner = getattr(F, f"_{getattr(function, '__name__', '')}", None)
        return None if inner is None else _of_python(inner)
    return tuple(Parameter(one.name, one.kind is one.KEYWORD_ONLY, one.default) for one in found)


def _spellings_of_raw(raw: str) -> Iterator[Spelling]:
    for overload, schema in _overloads(raw):
        parameters, view = _of_schema(schema), _is_view(schema)
        yield Spelling(f"aten.{schema.name}.{schema.overload_name}", "call_function", overload, parameters, view)
        builtin = getattr(torch, raw, None) or getattr(torch._C._nn, raw, None)
        if inspect.isbuiltin(builtin):
            yield Spelling(f"torch.{raw}: {schema.overload_name}", "call_function", builtin, parameters, view)
        if any(one.name == "self" for one in parameters) and hasattr(torch.Tensor, raw):
            first = sorted(parameters, key=lambda one: one.name != "self")
            yield Spelling(f"Tensor.{raw}: {schema.overload_name}", "call_method", raw, tuple(first), view)
            method, text = getattr(torch.Tensor, raw), f"torch.Tensor.{raw}: {schema.overload_name}"
            if inspect.ismethoddescriptor(method):
                yield Spelling(text, "call_function", method, tuple(first), view)
    for module in (F, torch.functional, torch.Tensor):
        function = getattr(module, raw, None)
        parameters = _of_python(function) if inspect.isfunction(function) else None
        if parameters is not None:
            yield Spelling(f"{module.__name__}.{raw}", "call_function", function, parameters)
    if hasattr(operator, raw):
        function = getattr(operator, raw)
        names = ("input", "other")[: len(inspect.signature(function).parameters)]
        if raw.strip("_") not in ("concat", "getitem", "setitem"):
            yield Spelling(f"operator.{raw}", "call_function", function, tuple(map(Parameter, names)))


def _raw_names(name: str) -> Iterator[str]:
    for raw in OPERATORS[name].spellings:
        yield raw
        if not raw.endswith("_"):
            yield f"{raw}_"


def spellings(name: str) -> list[Spelling]:
    """Every spelling that is read as the operator `name`, with parameters from torch."""
    # a function of another name can be read as this operator, too
    other = [full.rpartition(".")[2] for full, own in canonicalize.PYTHON_NAMES.items() if own == name]
    found = [spelling for raw in (*_raw_names(name), *other) for spelling in _spellings_of_raw(raw)]
    return [spelling for spelling in found if spelling.name() == name]


def _bound(spelling: Spelling, by_name: bool) -> CanonicalOp:
    """The call with a mark for each argument."""
    is_method = spelling.op == "call_method" or spelling.text.startswith("torch.Tensor.")
    args, kwargs = [], {}
    for place, one in enumerate(spelling.parameters):
        if (by_name or one.keyword_only) and not (is_method and place == 0):
            kwargs[one.name] = f"<{one.name}>"
        else:
            args.append(f"<{one.name}>")
    return spelling.call(tuple(args), kwargs)


def _flat(value: Any) -> Any:
    """A default in one spelling: [0] as 0, [] as None, a whole float as an int."""
    if isinstance(value, list | tuple):
        return _flat(value[0]) if value and all(one == value[0] for one in value) else None
    return value


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("name", VOCABULARY)
def test_arguments_by_position_are_those_of_torch(name: str) -> None:
    known = 0
    for spelling in spellings(name):
        by_place, by_name = _bound(spelling, False), _bound(spelling, True)
        if not by_place.known or name in CHECKED_BY_HAND or spelling.text.startswith("operator."):
            known += by_place.known
            continue
        known += 1
        if spelling.text in GIVES_INDICES:
            continue
        assert by_name.known, f"{spelling.text}: the name of an argument is not known: {by_name.args}"
        marks = {key: _unpacked(value) for key, value in by_place.args.items()}
        assert marks == {key: _unpacked(value) for key, value in by_name.args.items()}, spelling.text
    assert known or name in CHECKED_BY_HAND, "no spelling of this operator is checked"


def _unpacked(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("name", VOCABULARY)
def test_defaults_are_those_of_torch(name: str) -> None:
    for spelling in spellings(name):
        required = tuple(f"<{one.name}>" for one in spelling.parameters if one.default is inspect.Parameter.empty)
        found = spelling.call(required, {})
        full = _bound(spelling, True)
        if not found.known or not full.known:
            continue
        for one in spelling.parameters:
            place = next((key for key, value in full.args.items() if _unpacked(value) == f"<{one.name}>"), None)
            exempt = place in VALUELESS or f"{spelling.text} {place}" in OTHER_DEFAULTS
            if one.default is inspect.Parameter.empty or place is None or exempt:
                continue
            assert _flat(found.args[place]) == _flat(one.default), f"{spelling.text}: {one.name}"


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("name", VOCABULARY)
def test_what_torch_writes_or_aliases_is_known(name: str) -> None:
    for spelling in spellings(name):
        op = _bound(spelling, False)
        written = [one.name for one in spelling.parameters if one.written]
        if spelling.text.startswith(("aten.", "torch.", "Tensor.")):
            assert op.inplace == bool(written), spelling.text
        if written and op.known:
            assert [f"<{one}>" for one in written] == [op.input], spelling.text
        if spelling.aliases and op.known:
            assert op.has(Trait.ALIAS), f"{spelling.text} gives a view"


def test_by_hand_are_only_operators_without_a_schema() -> None:
    checked = {name for name in CHECKED_BY_HAND if any(_bound(one, False).known for one in spellings(name))}
    assert checked <= {"cpu", "cuda", "mT", "to"}
    assert set(CHECKED_BY_HAND) <= set(VOCABULARY)


def test_every_transfer_function_has_a_signature() -> None:
    """Without one the analysis would never call it."""
    assert not [name for name in TRANSFERS if "::" not in name and name not in SIGNATURES]


def test_every_operator_that_rules_name_is_in_the_vocabulary() -> None:
    assert {name for name, argument in LAYERS.items() if argument is not None} <= set(SIGNATURES)
    for name, record in OPERATORS.items():
        assert name not in SIGNATURES or record.linear <= set(SIGNATURES[name].names) | {"input"}


def test_every_layer_gives_arguments_of_its_operator() -> None:
    for layer, (name, _) in MODULE_OPS.items():
        assert name in SIGNATURES, layer


def _packets(name: str) -> list[Any]:
    """An operator's overloads that make a tensor of tensors: those in place, too."""
    return [overload for raw in _raw_names(name) for overload, _ in _overloads(raw)]


def test_elementwise_operators_are_torchs_pointwise_ones() -> None:
    special = Trait.MOVES | Trait.VIEW | Trait.CAST | Trait.FILL | Trait.SELECTS
    for name in spelled_as(Trait.ELEMENTWISE):
        tags = [tag for overload in _packets(name) for tag in overload.tags]
        assert torch.Tag.nondeterministic_seeded not in tags, name
        if not OPERATORS[name].traits & special and name not in NOT_TAGGED:
            assert torch.Tag.pointwise in tags, name


def test_operators_that_change_a_shape_in_place_are_those_that_torch_says() -> None:
    for raw in [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]:
        for overload, _ in _overloads(raw):
            if torch.Tag.inplace_view in overload.tags and raw not in ("detach_", "rename_"):
                assert spelling_of(raw)[0] in spelled_as(Trait.RESIZES), raw


MOVES = {
    "view": (-1,), "reshape": (6, 4), "unflatten": (1, (3, 1)), "expand": (5, 2, 3, 4), "permute": (2, 0, 1),
    "transpose": (0, 2), "movedim": (0, 2), "unsqueeze": (1,), "narrow": (1, 0, 2), "select": (1, 2), "roll": (1, 2),
    "unfold": (2, 2, 1), "repeat": (2, 1, 3), "tile": (2, 1), "flip": ((0,),), "view_as": (torch.zeros(6, 4),),
    "reshape_as": (torch.zeros(24),), "expand_as": (torch.zeros(5, 2, 3, 4),), "chunk": (2,), "split": (1,),
    "tensor_split": (2,), "index_select": (1, torch.tensor([2, 0])), "gather": (2, torch.tensor([[[3, 1]]])),
    "take_along_dim": (torch.tensor([[[3, 1]]]), 2),
    "masked_select": (torch.tensor([True, False, True, True]),),
}  # fmt: skip
"""The other arguments of operators that move the elements of a tensor of shape (2, 3, 4)."""
NO_FUNCTIONS = ("identity", "cuda", "T", "mT", "t", "requires_grad")
"""Attributes, and what a tensor of three dimensions or of the CPU does not have."""


@pytest.mark.parametrize("name", sorted({*spelled_as(Trait.MOVES | Trait.PARTS)} - {*NO_FUNCTIONS}))
def test_what_moves_elements_holds_them(name: str) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    function = getattr(torch.Tensor, name, None) or getattr(torch.ops.aten, name)
    result, record = function(x, *MOVES.get(name, ())), OPERATORS[name]
    assert isinstance(result, tuple | list) == bool(record.traits & Trait.PARTS)
    parts = result if isinstance(result, tuple | list) else [result]
    assert {value for part in parts for value in part.flatten().tolist()} <= set(range(24))
    shares = [part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts]
    assert any(shares) == bool(record.traits & Trait.ALIAS)
    if record.traits & Trait.ROW_MAJOR:
        assert torch.equal(result.flatten(), x.flatten())
    if record.traits & Trait.SAME:
        assert torch.equal(result, x)
    else:
        assert name == "squeeze" or not torch.equal(parts[0], x)


@pytest.mark.parametrize("op,target", [("call_method", "where"), ("call_function", torch.Tensor.where)])
def test_where_takes_its_condition_second_as_a_method(op: str, target: Any) -> None:
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    condition = graph.call_function(torch.gt, (x, 0))
    node = graph.create_node(op, target, (x, condition, other))
    graph.output(node)
    found = op_of(node)
    assert found is not None and found.name == "where"
    assert (found.get("condition"), found.get("input"), found.get("other")) == (condition, x, other)
    assert analyse(fx.GraphModule(torch.nn.Module(), graph)).fact(node) is None
