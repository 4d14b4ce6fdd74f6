"""One spelling for each operator, so that every rule and transfer function is written once.

`torch.mul`, `operator.mul`, `Tensor.mul`, `Tensor.mul_` and `torch.ops.aten.mul` are one operator to an analysis, and
so are `nn.Conv2d`, `F.conv2d` and `torch.conv2d`. `op_of` gives a normalised *view* of an fx node; it changes
nothing, so later stages still find the modules and methods they need.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from sparsecomp.passes.graph.layers import MODULE_OPS
from sparsecomp.passes.graph.operators import (
    VALUELESS,
    Form,
    Operator,
    Signature,
    Trait,
    parameters_of,
    record_of,
    spelling_of,
)
from sparsecomp.reference.precision import KERNEL_DTYPES

_OP_OVERLOAD = type(torch.ops.aten.add.Tensor)
_OP_PACKET = type(torch.ops.aten.add)
_TORCH_ROOTS = ("torch", "_operator", "operator", "math", "builtins")
_SHARED_NAMESPACES = {
    "torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._tensor", "torch._C.TensorBase",
    "torch._VF", "_operator", "operator",
}  # fmt: skip
"""Where one name means one operator; `torch.masked.sum` or `torch.fft.ifft` are others."""
PYTHON_NAMES = {"builtins.abs": "abs", "builtins.getattr": "getattr", "torch.nn.functional.unfold": "im2col"}
"""Functions by full name: built-ins that mean torch's operator, and functions that mean another than their name's."""
_FILLS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
RESHAPED = "sparsecomp_reshaped"
"""Key of `node.meta`: operators in place change the tensor's shape, so that no one example stands for it."""


@dataclass(frozen=True)
class CanonicalOp:
    """A normalised view of one fx node.

    Attributes:
        name: canonical operator name, such as `conv2d`, `mul`, `max_pool2d`, or `namespace::name` for a custom op.
        args: arguments by parameter name, defaults filled in; `other_0`, `other_1`, … where the signature is unknown.
        node: the node itself.
        inplace: the result is written into the first argument.
        module: the called module, for `call_module` nodes.
        step_mode: `m` if a multi-step layer applies the operator to (T·B, …), its input being (T, B, …).
        out: the `out=` argument.
        known: False if the operator has no signature here; then `args` are positional.
    """

    name: str
    args: Mapping[str, Any]
    node: fx.Node
    inplace: bool = False
    module: nn.Module | None = None
    step_mode: str = "s"
    known: bool = True
    out: Any = None

    @property
    def input(self) -> Any:
        """The first argument."""
        return next(iter(self.args.values()), None)

    @property
    def record(self) -> Operator:
        """What is known of the operator whatever it is called with."""
        return record_of(self.name)

    def has(self, trait: Trait) -> bool:
        """Whether the operator has a trait, or one of several."""
        return bool(self.record.traits & trait)

    @property
    def is_identity(self) -> bool:
        """Whether this gives its input itself, as dropout does in evaluation."""
        return self.name == "identity" or (self.has(Trait.DROPOUT) and self.get("training") is False)

    def reinterprets(self) -> bool:
        """Whether this is `view(dtype)`, which reads the bits as another type."""
        size = self.get("size") if self.name == "view" else None
        return any(isinstance(part, torch.dtype) for part in (size if isinstance(size, tuple) else (size,)))

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by name, `default` if the operator has no such parameter."""
        return self.args.get(name, default)


_bound: ContextVar[dict[fx.Node, tuple[Any, Any, Any, CanonicalOp | None]] | None] = ContextVar("bound", default=None)
"""What calls are, each with the target and arguments that it had then; none are kept outside `binding_once`."""


@contextmanager
def binding_once() -> Iterator[None]:
    """Within it a call's arguments are bound once, though every rule asks, and the analysis between them; of a changed
    call, whose arguments are other objects, anew."""
    token = _bound.set({})
    try:
        yield
    finally:
        _bound.reset(token)


def op_of(node: fx.Node, modules: Mapping[str, nn.Module] | None = None) -> CanonicalOp | None:
    """The canonical view of `node`, or None for placeholders, attributes, outputs and opaque modules.

    `modules` maps targets to modules; without it they are looked up in the node's own graph module.
    """
    if node.op == "call_module":
        return _module_op(node, _module_of(node, modules))
    if node.op not in ("call_function", "call_method"):
        return None
    bound, call = _bound.get(), (node.target, node.args, node.kwargs)
    if bound is None:
        return _call_op(node)
    *before, op = bound.get(node, (None,))
    if not before or any(then is not now for then, now in zip(before, call, strict=True)):
        op = _call_op(node)
        bound[node] = (*call, op)
    return op


def _call_op(node: fx.Node) -> CanonicalOp | None:
    raw = target_name(node)
    if raw is None:
        return None
    name, inplace = spelling_of(raw)
    kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
    args, known = _bind(name, _form(node), node.args, kwargs)
    return CanonicalOp(
        name, args, node, inplace or args.get("inplace") is True, known=known, out=node.kwargs.get("out")
    )  # fmt: skip


def target_name(node: fx.Node) -> str | None:
    """The bare name of what a node calls, such as `mul_`, `conv2d`, `sj_lif::forward`; None if it is not torch's."""
    target = node.target
    if node.op == "call_method":
        return str(target)
    if isinstance(target, _OP_OVERLOAD | _OP_PACKET):
        return _overload_name(target)
    name = getattr(target, "__name__", None)
    module = getattr(target, "__module__", None)
    if module == "torch.ops.higher_order":
        return f"higher_order::{name}"
    if module is None and isinstance(getattr(target, "__objclass__", None), type):
        module = "torch"  # method descriptors such as torch.Tensor.mul
    if name is None or module is None or module.split(".")[0] not in _TORCH_ROOTS:
        return None
    full = f"{module}.{name}"
    return PYTHON_NAMES.get(full) or (name if module in _SHARED_NAMESPACES else full)


def _form(node: fx.Node) -> Form:
    """How the call of a torch operator is spelled."""
    target = node.target
    if node.op == "call_method" or hasattr(target, "__objclass__"):
        return Form.METHOD
    return Form.PYTHON if isinstance(target, FunctionType) else Form.ATEN


def shape_of(value: object) -> tuple[int | None, ...] | None:
    """The shape of a node or tensor, None if unknown; symbolic sizes are None."""
    tensor = example_of(value)
    if tensor is None:
        return None
    return tuple(size if type(size) is int else None for size in tensor.shape)


def dtype_of(value: object) -> torch.dtype | None:
    """The dtype of a node or tensor, None if unknown."""
    tensor = example_of(value)
    return None if tensor is None else tensor.dtype


def numel_of(value: object) -> int | None:
    """The number of elements of a node or tensor, None if unknown."""
    shape = shape_of(value)
    if shape is None or any(size is None for size in shape):
        return None
    return torch.Size([size for size in shape if size is not None]).numel()


def example_of(value: object) -> Any:
    """The fake or real tensor (or fx `TensorMetadata`) that stands for a node, None if the graph carries none."""
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, fx.Node) or RESHAPED in value.meta:
        return None
    for key in ("example_value", "val", "tensor_meta"):
        example = value.meta.get(key)
        if hasattr(example, "shape") and hasattr(example, "dtype"):
            return example
    return None


def filled_with(node: fx.Node) -> float | None:
    """The number that a tensor of up to float32 is made of, everywhere; None if it is none that the graph shows."""
    op, example = op_of(node), example_of(node)
    if op is None or example is None or example.dtype not in KERNEL_DTYPES or op.inplace or op.out is not None:
        return None
    number = _FILLS.get(op.name)
    if op.name in ("full", "full_like", "new_full"):
        number = op.get("fill_value")
    if op.name in ("tensor", "as_tensor", "scalar_tensor") and example.device.type == "cpu":
        number = op.get("data")
    # of a Python number; a tensor on the device divides in another way
    if not isinstance(number, int | float):
        return None
    half = example.dtype is not torch.float32
    return float(torch.tensor(number, dtype=example.dtype, device="cpu")) if half else float(number)


def _overload_name(target: Any) -> str:
    """`aten` overloads share torch's names; other namespaces keep theirs."""
    qualified = target.name() if isinstance(target, _OP_OVERLOAD) else str(target).replace(".", "::")
    namespace, _, name = qualified.partition("::")
    name = name.split(".")[0]
    return name if namespace == "aten" else f"{namespace}::{name}"


def _bind(
    name: str, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Arguments by parameter name, and whether the signature has a place for each of them."""
    signature = parameters_of(name, form)
    positional = args if signature is None else _gather_variadic(signature.names, signature.variadic, args)
    named = {} if signature is None else {_parameter(signature, key): value for key, value in kwargs.items()}
    unplaced = bool(named) and signature is not None and not named.keys() <= _places(signature)
    if signature is None or len(positional) > len(signature.names) or unplaced:
        bound = {f"other_{index}": value for index, value in enumerate(args)}
        return {**bound, **kwargs}, False
    bound: dict[str, Any] = dict.fromkeys((*signature.names, *signature.named)) | dict(signature.defaults)
    bound.update(zip(signature.names, positional, strict=False))
    return {**bound, **named}, True


def _places(signature: Signature) -> set[str]:
    return {*signature.names, *signature.named, *VALUELESS}


def _parameter(signature: Signature, keyword: str) -> str:
    return keyword if keyword in signature.names else signature.renames.get(keyword, keyword)


def _gather_variadic(names: tuple[str, ...], variadic: str | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`x.view(2, 3)` and `x.view((2, 3))` bind alike."""
    if variadic is None:
        return args
    index = names.index(variadic)
    rest = args[index:]
    if len(rest) == 1 and isinstance(rest[0], tuple | list):
        rest = tuple(rest[0])
    return (*args[:index], tuple(rest)) if rest else args[:index]


def _module_of(node: fx.Node, modules: Mapping[str, nn.Module] | None) -> nn.Module | None:
    if modules is not None:
        return modules.get(str(node.target))
    owner = node.graph.owning_module
    return None if owner is None else owner.get_submodule(str(node.target))


def has_hooks(module: nn.Module) -> bool:
    """Forward hooks may replace a module's result, backward hooks its gradients, so nothing is known about either."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _module_op(node: fx.Node, module: nn.Module | None) -> CanonicalOp | None:
    """The functional view of a call of one of torch's own layers, or of a step-mode layer derived from one."""
    if module is None or has_hooks(module):
        return None
    step_mode = "s"
    layer: type[nn.Module] = type(module)
    if layer not in MODULE_OPS:
        base = _step_module_base(module)
        if base is None:
            return None
        layer, step_mode = base, str(getattr(module, "step_mode", "s"))
    if len(node.args) + len(node.kwargs) != 1:  # with an `output_size`, such as of a transposed convolution
        return None
    name, read = MODULE_OPS[layer]
    call: Callable[[Any, nn.Module], dict[str, Any]] = read
    value = node.args[0] if node.args else node.kwargs.get("input")
    args = call(value, module)
    return CanonicalOp(name, args, node, bool(args.get("inplace")), module, step_mode)


def _step_module_base(module: nn.Module) -> type[nn.Module] | None:
    """spikingjelly's layers subclass torch's and only flatten (T, B) around them."""
    if not type(module).__module__.startswith("spikingjelly.") or type(module).__name__ not in _STEP_LAYERS:
        return None
    return next((base for base in type(module).__mro__ if base in MODULE_OPS), None)


_STEP_LAYERS = {
    "Conv1d", "Conv2d", "Conv3d", "Linear", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm",
    "MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d",
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "Flatten", "Upsample",
}  # fmt: skip
