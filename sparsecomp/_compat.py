"""Every private or version-dependent part of torch that sparsecomp uses, for torch 2.11 to 2.14.

One file to read when a torch release breaks something. Inductor is imported inside the functions that need it, because
importing it takes seconds.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from itertools import count
from operator import getitem
from typing import Any, ParamSpec, TypeVar, cast

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.utils import counters
from torch._functorch import pyfunctorch
from torch._guards import CompileContext
from torch._logging._internal import register_log
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    maybe_get_fake_mode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from sparsecomp.errors import SparseOperatorError

__all__ = [
    "BreaksGraph",
    "FakeTensorMode",
    "OneLevelFunction",
    "TorchDispatchMode",
    "add_constant",
    "addmm_relu",
    "ambient_modes",
    "asks_in_each_call",
    "autocast_followed",
    "below_autograd",
    "cache_key",
    "call_directly",
    "calls_are_told",
    "children_of",
    "compilation_of",
    "compile_apart",
    "compile_fx",
    "compiled_by",
    "compiled_frame",
    "conv_tf32",
    "described",
    "empty_of",
    "fake_of",
    "graph_break_of",
    "graph_break_reasons",
    "has_module",
    "hooks_of",
    "inductor_types",
    "inside_transform",
    "is_fake",
    "is_persistent",
    "isolated_compile",
    "keep_for_backward",
    "make_wrapper",
    "matmul_tf32",
    "names_of",
    "one_level",
    "outside_modes",
    "passes_errors",
    "plain_eager",
    "propagate_fakes",
    "readable",
    "register_artifact",
    "register_logger",
    "serve_one_module",
    "serve_while",
    "sets_autocast",
    "sets_grad_mode",
    "share_hooks",
    "size_expression",
    "size_hint",
    "state_hooks_of",
    "storage_of",
    "trace_neurons_whole",
    "transform_nesting",
    "tree_leaves",
    "without_torch_function",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str,
    patches: Mapping[str, Any],
    decompositions: Callable[[], Mapping[Any, Callable[..., Any]]] | None,
    partition: "Partition | None" = None,
) -> Callable[..., Any]:
    """Inductor's compilation of Dynamo's graph, under torch.compile's `mode`.

    `patches` are Inductor configuration on top of the mode's; the table that `decompositions` (a module's function)
    returns is added to Inductor's own. Without it this is exactly Inductor's backend. `partition` (a module's function,
    or a `functools.partial` of one) makes forward and backward of a joint graph, of what torch's partitioner makes.

    Raises:
        AttributeError: a name in `patches` that is no Inductor configuration.
    """
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx as inductor

    # Sizes are what Dynamo's guards say; to check them in each call takes the host as long as a small kernel. Padded
    # rows would be copied for our operators, and torch 2.11 has kernels read them of memory that it did not pad.
    ours = {} if decompositions is None else {"size_asserts": False, "comprehensive_padding": False}
    settings = {**list_mode_options(mode), **ours, **patches}
    if partition is not None:
        inner = settings.get("custom_partitioner_fn", config.custom_partitioner_fn)
        settings["custom_partitioner_fn"] = _partitioner()(partition, inner)
    arguments: dict[str, Any] = {"config_patches": settings or None}
    if decompositions is not None:
        with config.patch(settings):
            arguments["decompositions"] = _Decompositions(decompositions)
    return cast(Callable[..., Any], inductor(gm, example_inputs, **arguments))


def undisabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function without the wrapper that keeps Dynamo off it, for callers that Dynamo is kept off already."""
    from torch._dynamo.eval_frame import innermost_fn

    return innermost_fn(function)


Partition = Callable[[fx.GraphModule, Callable[[], tuple[fx.GraphModule, fx.GraphModule]], int], Any]
"""Of a joint graph, torch's partitioner of it, and the number of the forward's results that the user gets."""


@cache
def _partitioner() -> Callable[..., Any]:
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __init__(self, partition: Partition, inner: Any) -> None:
            self.partition, self.inner = partition, inner

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            split = self.inner or min_cut_rematerialization_partition
            return self.partition(gm, lambda: split(gm, joint_inputs, **kwargs), kwargs["num_fwd_outputs"])

        def uuid(self) -> Any:
            return "sparsecomp", self.inner and self.inner.uuid()  # what ours does: see `cache_key`

        def __reduce__(self) -> tuple[Any, ...]:
            return _made_partitioner, (self.partition, self.inner)

    return Partitioner


def _made_partitioner(partition: Partition, inner: Any) -> Any:
    return _partitioner()(partition, inner)


@cache
def inductor_types() -> Mapping[str, type]:
    """Every name of Inductor's configuration and the type of its values; `object` where that is not one class."""
    from torch._inductor import config

    given: Any = config
    types = {name: given.get_type(name) for name in given.get_config_copy()}
    return {name: kind if isinstance(kind, type) else object for name, kind in types.items()}


@cache
def call_directly(operators: frozenset[Any], kept: frozenset[Any], replayed: str) -> None:
    """Have Inductor's code call `operator.direct_cpu` or `direct_cuda` where it would call the operator.

    In a graph of static shapes, on a GPU, each site gets an object of its own that it calls: what `replayed` makes of
    the implementation.

    What such an operator reads besides others is computed once, as before a matrix product. Otherwise a residual
    connection would be summed up from its first term behind each layer again.

    Args:
        kept: those of them whose result's memory nothing else may use.
        replayed: a class, as module and name.
    """
    from torch._inductor import ir
    from torch._inductor.graph import SubgraphLowering
    from torch._inductor.lowering import add_needs_realized_inputs, register_lowering
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_map

    class Direct(ir.FallbackKernel):
        def __init__(self, layout: Any, kernel: Any, tensor_args: Any, *rest: Any, **kwargs: Any) -> None:
            super().__init__(layout, kernel, tensor_args, *rest, **kwargs)
            self.is_replayed = False
            device = tensor_args[0].get_device()
            name = f"direct_{device.type}"
            if hasattr(kernel, name) and not V.graph.cpp_wrapper:  # C++ reaches operators only
                self.python_kernel_name = f"{self.python_kernel_name}.{name}"
                self.is_replayed = device.type == "cuda" and _is_static(tensor_args, rest[0])

        def codegen(self, wrapper: Any) -> None:
            if self.is_replayed and not isinstance(V.graph, SubgraphLowering):
                self.is_replayed = False
                module, name = replayed.rsplit(".", 1)
                wrapper.add_import_once(f"from {module} import {name}")
                site = f"{self.get_name()}_site"
                wrapper.header.writeline(f"{site} = {name}({self.python_kernel_name})")
                self.python_kernel_name = site
            super().codegen(wrapper)

    def lowering_of(operator: Any) -> Callable[..., Any]:
        def lower(*args: Any, **kwargs: Any) -> Any:
            made = Direct.create(operator, *args, **kwargs)
            if operator in kept:
                V.graph.never_reuse_buffers.add(made.get_name())
            return tree_map(lambda node: ir.TensorBox.create(node) if isinstance(node, ir.IRNode) else node, made)

        return lower

    add_needs_realized_inputs(list(operators))
    for operator in operators:
        register_lowering(operator, type_promotion_kind=None)(lowering_of(operator))


def _is_static(tensors: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether nodes of Inductor have sizes and strides of numbers, and no other argument is symbolic."""
    numbers = [number for tensor in tensors for number in (*tensor.get_size(), *(tensor.maybe_get_stride() or (None,)))]
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Basic)
    return all(isinstance(number, (int, sympy.Integer)) for number in numbers) and not any(
        isinstance(leaf, symbolic) and not isinstance(leaf, sympy.Number) for leaf in tree_leaves(list(others))
    )


class _Decompositions(dict[Any, Callable[..., Any]]):
    """Inductor's table and ours, which pickles as the name of the function that makes ours.

    Inductor's cache pickles the table for its key, and would do without a cache because some of its own decompositions
    cannot be pickled. What ours do is already in the key: see `cache_key`.
    """

    def __init__(self, extra: Callable[[], Mapping[Any, Callable[..., Any]]]) -> None:
        from torch._inductor.decomposition import select_decomp_table

        super().__init__({**select_decomp_table(), **extra()})
        self._extra = extra

    def __reduce__(self) -> tuple[Any, ...]:
        return _Decompositions, (self._extra,)


@contextmanager
def cache_key(tag: str) -> Iterator[None]:
    """Make `tag` part of the key of every compilation cache; tags that others have set stay."""
    before = torch.compiler.config.cache_key_tag
    patch = getattr(torch.compiler.config, "patch")  # noqa: B009  (installed at run time)
    with patch(cache_key_tag=f"{before}|{tag}"):
        yield


def addmm_relu(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """relu(left @ right + bias) by cuBLASLt, which does it in the product."""
    return cast(Any, torch.ops.aten)._addmm_activation.default(bias, left, right)


def empty_of(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """`torch.empty_strided` on a device: on the current GPU, while it is that, at less host time, as Inductor's code
    calls it."""
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        return cast(Any, torch._C)._dynamo.guards._empty_strided_cuda
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)


def conv_tf32() -> bool:
    """Whether the user lets float32 convolutions run in TF32."""
    # torch raises if it is asked by `allow_tf32` about what was set by `fp32_precision`
    return cast(Any, torch.backends.cudnn).conv.fp32_precision == "tf32"


def matmul_tf32() -> bool:
    """Whether the user lets float32 matrix products run in TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def matmul_bits(device: str) -> int:
    """Bits of a float32 operand that the user lets a device's matrix products keep."""
    backend = torch.backends.mkldnn if device == "cpu" else torch.backends.cuda
    return {"bf16": 8, "tf32": 11}.get(cast(Any, backend).matmul.fp32_precision, 24)


def jit_traces() -> bool:
    """Whether torch.jit.trace is at work."""
    return bool(cast(Any, torch.jit).is_tracing())


def inside_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, …) is at work, of which our operators know nothing."""
    return cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None


def inside_forward_mode() -> bool:
    """Whether tensors may carry tangents; a traced transform tells of its level nowhere else than in the stack."""
    return forward_ad._current_level >= 0 or inside_transform()


def carries_levels(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a transform's own, or has a tangent: what lies below autograd would lose that."""
    if forward_ad._current_level >= 0:
        with above_autograd():
            if cast(Any, forward_ad).unpack_dual(tensor, level=0).tangent is not None:
                return True
    return bool(cast(Any, torch._C)._functorch.is_functorch_wrapped_tensor(tensor))


def outside_transforms() -> AbstractContextManager[Any]:
    """Context within which no transform of torch.func is at work; a transform's own tensors mean nothing in it."""
    return pyfunctorch.temporarily_clear_interpreter_stack()


@contextmanager
def outside_modes() -> Iterator[None]:
    """Context within which no mode sees what torch runs: for what is kept, and is none of a mode's.

    Of functions too: one of torch.export's writes down each change of whether gradients are recorded.
    """
    with _disable_current_modes(), cast(Any, torch._C).DisableTorchFunction():
        yield


@contextmanager
def next_level() -> Iterator[None]:
    """Context within which the outer transforms record, which the forward of an autograd.Function has switched off."""
    with cast(Any, forward_ad)._set_fwd_grad_enabled(True), torch.enable_grad():
        yield


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view that takes a gradient, of a tensor that takes none, also while a transform of torch.func is at work."""
    functorch = cast(Any, torch._C)._functorch
    before = functorch.get_inplace_requires_grad_allowed()
    functorch.set_inplace_requires_grad_allowed(True)
    try:
        return tensor.view_as(tensor).requires_grad_()  # detached it would be to the outer transforms too
    finally:
        functorch.set_inplace_requires_grad_allowed(before)


OneLevelFunction: Any = cast(Any, torch.autograd.function)._SingleLevelFunction
"""An autograd.Function that only ever records for the level at work: see `one_level`."""


@contextmanager
def one_level() -> Iterator[None]:
    """Context within which a `OneLevelFunction` may record while a transform of torch.func is at work."""
    functorch = cast(Any, torch._C)._functorch
    before = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        functorch.set_single_level_autograd_function_allowed(before)


def plain_eager() -> bool:
    """Whether an operator called now means just itself: nothing traces, transforms or watches the calls."""
    return not (
        torch.compiler.is_compiling()
        or cast(Any, torch._C)._len_torch_dispatch_stack()
        or inside_forward_mode()
        or jit_traces()
    )


def calls_are_told() -> bool:
    """Whether a mode of torch functions, or a profiler, is told of each call of an operator."""
    return cast(Any, torch.autograd)._profiler_enabled() or bool(cast(Any, torch._C)._len_torch_function_stack())


class BreaksGraph(SparseOperatorError, DataDependentOutputException):
    """What is asked for depends on the contents of tensors that are being traced: Dynamo breaks its graph there."""

    def __init__(self, what: str) -> None:
        SparseOperatorError.__init__(self, f"{what}, in a graph that is being traced: do it outside of the graph")
        self.func = cast(Any, what)  # as Dynamo names it where it must not break


below_autograd = cast(Any, torch._C)._AutoDispatchBelowADInplaceOrView
"""Context within which operators neither record gradients nor views."""


def in_backward() -> bool:
    """Whether a backward pass calls, which on CUDA is another thread than the one that asked for it."""
    return cast(Any, torch._C)._current_graph_task_id() != -1


@contextmanager
def above_autograd() -> Iterator[None]:
    """Within an operator: the operators that it calls record gradients and views again."""
    core: Any = torch._C
    excluded = core._dispatch_tls_local_exclude_set()
    for key in (core.DispatchKey.AutogradFunctionality, core.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    with core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def keep_for_backward(tensor: torch.Tensor) -> None:
    """Where a graph is traced: its backward gets this tensor, or what is made of it, and does not compute it again.

    A partitioner would take what it was made of instead where that is smaller, unless the user asked for a checkpoint.
    """
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return
    if isinstance(tensor, FunctionalTensor):
        tensor = cast(Any, torch)._from_functional_tensor(tensor.elem)
    slot: Any = proxy_tensor.get_proxy_slot(tensor, cast(Any, mode).tracer, None)
    node = None if slot is None else slot.proxy.node
    while isinstance(node, fx.Node) and node.op == "call_function":
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        returned = getattr(getattr(node.target, "_schema", None), "returns", ())
        is_part = node.target is getitem or any(one.alias_info is not None for one in returned)
        node = node.args[0] if is_part else None


def ambient_modes() -> tuple[Any, ...]:
    """The modes of this thread under which operators mean something else."""
    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def sets_grad_mode(node: fx.Node) -> bool:
    """Whether a node of Dynamo's switches gradients on or off, by its first argument."""
    return node.target in (torch._C._set_grad_enabled, torch.set_grad_enabled)


def sets_inference_mode(node: fx.Node) -> bool:
    """Whether a node of Dynamo's begins or ends inference mode."""
    modes = torch.autograd.grad_mode
    return node.target in (modes._enter_inference_mode, modes._exit_inference_mode)


def sets_autocast(node: fx.Node) -> bool:
    """Whether a node of Dynamo's begins or ends autocast."""
    return node.target in (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


@contextmanager
def autocast_followed() -> Iterator[Callable[[fx.Node], None]]:
    """A function that, told of a graph's nodes in their order, has autocast on as the graph has it there."""
    regions: list[Any] = []

    def follow(node: fx.Node) -> None:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            regions.append(torch.amp.autocast_mode._enter_autocast(*cast(Any, node.args)))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            torch.amp.autocast_mode._exit_autocast(regions.pop())

    try:
        yield follow
    finally:
        for mode in reversed(regions):
            torch.amp.autocast_mode._exit_autocast(mode)


def transform_nesting(node: fx.Node) -> int:
    """By how many transforms of torch.func a node of Dynamo's begins (1) or ends (-1); 0 for any other."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def storage_of(tensor: torch.Tensor) -> object:
    """What two tensors have in common that share memory; the tensor itself where it has no memory of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def is_fake(value: object) -> bool:
    """Whether a tensor has no data to look at."""
    return isinstance(value, FakeTensor)


def fake_of(value: torch.Tensor, beside: object) -> torch.Tensor:
    """A stand-in for `value` in the fake mode of another stand-in, `value` itself if that is none."""
    if not isinstance(beside, FakeTensor):
        return value
    return cast(Any, beside).fake_mode.from_tensor(value.detach(), static_shapes=True)


def size_hint(size: int | torch.SymInt) -> int | None:
    """The value a symbolic size had in the example, without a guard; None if it has none."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return None if hint is None else int(hint)


def described(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a compiled graph may take for granted of a tensor, with both the symbols of sizes and their values."""
    layout = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    sizes = [(str(size), size_hint(size)) for size in layout]
    return tensor.dtype, tensor.device, sizes


def propagate_fakes(node: fx.Node) -> Any:
    """What the node's call gives on the example values of its arguments; changes nothing.

    Raises:
        Exception: whatever the operator's meta implementation raises.
    """
    examples = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["example_value"])
    args, kwargs = examples
    # a wrapper subclass is no fake itself, but holds some
    known = [*_tensors(examples)] or [*_tensors([other.meta.get("example_value") for other in node.graph.nodes])]
    modes = [mode for value in known if (mode := maybe_get_fake_mode(value)) is not None]
    mode = modes[0] if modes else FakeTensorMode()
    # by Python's decompositions, as Dynamo does it: in C++ some products of torch 2.12 ask symbols for numbers
    with mode, torch.no_grad(), enable_python_dispatcher():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def add_constant(gm: fx.GraphModule, value: torch.Tensor) -> str:
    """Make a tensor a buffer of a graph's module, which a CUDA graph reads where it lies; returns its name."""
    from torch._dynamo.source import ConstantSource

    name = next(name for number in count() if not hasattr(gm, name := f"_sparsecomp_constant{number}"))
    gm.register_buffer(name, value)
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:  # AOTAutograd asks Dynamo's graphs where each of their buffers comes from
        sources[name] = ConstantSource(source_name=name)
    return name


def remove_constant(gm: fx.GraphModule, name: str) -> None:
    """Undo `add_constant`."""
    delattr(gm, name)
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:
        del sources[name]


def readable(gm: fx.GraphModule, tag: str) -> str:
    """The graph's code with shapes, source lines and `node.meta[tag]` as comments."""
    return gm.print_readable(print_output=False, additional_meta=[tag])


def register_logger(name: str) -> None:
    """Let TORCH_LOGS and torch._logging.set_logs switch the logger `name` by its own name."""
    register_log(name, name)


@contextmanager
def graph_break_reasons(found: list[str]) -> Iterator[None]:
    """Collect Dynamo's reasons for the graph breaks that happen inside."""
    before = dict(counters["graph_break"])
    try:
        yield
    finally:
        found += [reason for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)]


@cache
def trace_neurons_whole(leaf_makers: tuple[str, ...]) -> None:
    """Have Dynamo trace two lines of spiking libraries at which it would end its graph, whatever the backend.

    A list that a class of autograd.Function holds is read as that of any other class. And a tensor that a module of
    `leaf_makers` has just made, and says to require a gradient, stays as it is: nobody can ask for that gradient. Only
    whether a result requires one is told apart by it, where nothing else would be trained.

    Args:
        leaf_makers: beginnings of modules' names.
    """
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    read = "var_getattr" if hasattr(AutogradFunctionVariable, "var_getattr") else "tp_getattro_impl"  # torch 2.14's
    of_function = getattr(AutogradFunctionVariable, read)

    def getattr_of(self: Any, tx: Any, name: str) -> Any:
        value = inspect.getattr_static(self.fn_cls, name, None)
        if self.source is not None and isinstance(value, list | tuple):
            return VariableTracker.build(tx, value, AttrSource(self.source, name))
        return of_function(self, tx, name)

    # from torch 2.13 on each builtin has a class of its own
    owner: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
    method = "_call_setattr" if hasattr(owner, "_call_setattr") else "call_setattr"
    assign = getattr(owner, method)

    def setattr_of(self: Any, tx: Any, obj: Any, name_var: Any, val: Any) -> Any:
        makes_leaf = tx.f_globals.get("__name__", "").startswith(leaf_makers) and isinstance(obj, TensorVariable)
        if makes_leaf and name_var.as_python_constant() == "requires_grad" and not _is_given(obj.as_proxy().node):
            return ConstantVariable.create(None)
        return assign(self, tx, obj, name_var, val)

    setattr(AutogradFunctionVariable, read, getattr_of)
    setattr(owner, method, setattr_of)


def _is_given(node: fx.Node) -> bool:
    """Whether a node of Dynamo's stands for a tensor that is an input of the graph, itself."""
    given = [one.meta.get("example_value") for one in node.graph.nodes if one.op in ("placeholder", "get_attr")]
    return any(value is node.meta["example_value"] for value in given)


def graph_break_of(gm: fx.GraphModule) -> list[str]:
    """Why Dynamo ended a graph before the function's end; nothing where it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return [str(reason.reason)] if reason is not None and reason.graph_break else []


def compiled_by() -> object | None:
    """What one call of `torch.compile` made, while a graph of its function is compiled; None where torch hides it.

    All graphs of one model have it in common, before and after each break.
    """
    found, frame = None, inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            found = frame.f_locals.get("self", found)
        frame = frame.f_back
    return getattr(found, "dynamo_ctx", found)  # which a module's wrapper holds


def compilation_of(compiled: object) -> object | None:
    """What `compiled_by` gives for a model or function that `torch.compile` made, None for any other."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled  # nn.Module.compile()
    config = getattr(compiled, "get_compiler_config", None)
    return None if config is None else inspect.getclosurevars(config).nonlocals.get("self")


def serve_one_module(inputs: Iterable[fx.Node]) -> None:
    """Have the graph that Dynamo compiles serve only the modules that the inputs belong to; see `has_module`.

    Another module of the same class gets a graph of its own. Where the module is a local variable itself, such as
    `self`, that counts towards no limit of recompilations.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard

    for node in inputs:
        source = _module_source(node)
        if source is not None:
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def asks_in_each_call() -> bool:
    """Whether Dynamo asks the condition of `serve_while`; torch 2.11's does not of a module's buffer."""
    return cast(Any, torch).__version__ >= (2, 12)


def serve_while(node: fx.Node, holds: Callable[[torch.Tensor], bool]) -> None:
    """Have the graph that Dynamo compiles serve only while a condition on an input of its holds, asked in each call."""
    from torch._dynamo.guards import get_verbose_code_parts, install_guard

    def condition(builder: Any, guard: Any) -> None:
        told = get_verbose_code_parts(f"what sparsecomp proved of {guard.name}", guard)
        builder.get_guard_manager(guard).add_lambda_guard(holds, told, guard.user_stack)

    install_guard(node.meta["grapharg"].source.make_guard(condition))


def has_module(node: fx.Node) -> bool:
    """Whether an input of a graph of Dynamo's is an attribute of an nn.Module, which the graph can be tied to."""
    return _module_source(node) is not None


def _module_source(node: fx.Node) -> Any:
    """Where Dynamo found the outermost module that an input belongs to; None if there is none, or no compilation."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    source: Any = getattr(node.meta.get("grapharg"), "source", None)
    try:
        output: Any = InstructionTranslator.current_tx().output
    except AttributeError:  # no compilation of Dynamo's
        return None
    scope, chain = {"L": output.local_scope, "G": output.global_scope}, []
    while source is not None:
        chain.append(source)
        source = getattr(source, "base", None)
    return next((one for one in reversed(chain) if isinstance(_value_of(one, scope), torch.nn.Module)), None)


def _value_of(source: Any, scope: Mapping[str, Any]) -> Any:
    name = str(source.name() if callable(source.name) else source.name)
    try:
        return eval(name, {}, dict(scope))
    except Exception:
        return None


def compiled_frame() -> int | None:
    """A number of the code that is compiled, the same when it is compiled anew; None outside a compilation."""
    compilation = CompileContext.current_compile_id()
    return None if compilation is None else compilation.frame_id


def passes_errors(kind: type[Exception]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Errors of this kind leave a backend as what they are, not wrapped in a `BackendCompilerFailed`."""

    def passing(backend: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(backend)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return backend(*args, **kwargs)
            except kind as error:
                bases = (ShortenTraceback, type(error))  # of the first, Dynamo does not wrap any
                named: Any = type(type(error).__name__, bases, {"__module__": type(error).__module__})
                raise named(*error.args, first_useful_frame=sys._getframe()) from error.__cause__

        return run

    return passing


def isolated_compile(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that neither uses nor fills the caches of other compilations of the same code.

    Nor does what they have seen make a size a symbol here.

    Before torch 2.12 that needs a reset of Dynamo, as `torch._dynamo.explain` does.
    """
    if not _ISOLATES:
        torch.compiler.reset()
    return compile_apart(function, backend, dynamic=False)


def compile_apart(
    function: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None = None
) -> Callable[..., Any]:
    """`torch.compile` whose recompilations count against no limit of others of the same code, from torch 2.12 on."""
    apart: Any = {"isolate_recompiles": True} if _ISOLATES else {}
    return torch.compile(function, backend=backend, dynamic=dynamic, **apart)


_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def size_expression(size: int | torch.SymInt) -> int | sympy.Expr:
    """A size as the expression over Dynamo's symbols that it stands for; a number stands for itself."""
    return cast(sympy.Expr, size.node.expr) if isinstance(size, torch.SymInt) else size


def register_artifact(name: str, load: Callable[[bytes], None]) -> Callable[[str, bytes], None] | None:
    """Take part in `torch.compiler.save_cache_artifacts` under `name`, once a process.

    `load` gets each content that `load_cache_artifacts` finds under the name.

    Returns:
        What records a key and its content, or None where torch does not offer this.
    """
    try:
        from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

        @CacheArtifactFactory.register
        class Artifact(CacheArtifact):
            @staticmethod
            def type() -> str:
                return name

            def populate_cache(self) -> None:
                load(self.content)

        record = CacheArtifactManager.record_artifact
    except (ImportError, AttributeError, TypeError):
        return None
    return lambda key, content: record(name, key, content)


def make_wrapper(
    cls: type, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Any:
    """A tensor of a subclass that holds other tensors and has no memory of its own."""
    make = cast(Any, torch.Tensor)._make_wrapper_subclass
    return make(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)


without_torch_function = cast(Any, torch._C).DisableTorchFunctionSubclass
"""Context within which torch's functions do not ask tensor subclasses; Dynamo knows it by its own name."""


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOW_HOOKS_RUN = (
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_is_full_backward_hook",
)  # fmt: skip
_STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
)  # fmt: skip


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """What runs before and after the module's forward and backward, the module's own hooks only."""
    return [hook for kind in _HOOKS for hook in getattr(module, kind).values()]


def state_hooks_of(module: torch.nn.Module) -> list[Any]:
    """What the module's own hooks run before and after its state is made or loaded."""
    # torch wraps those that are given the module
    return [getattr(hook, "hook", hook) for kind in _STATE_HOOKS for hook in getattr(module, kind).values()]


def share_hooks(old: torch.nn.Module, new: torch.nn.Module, without: Sequence[Any]) -> None:
    """Have `new` run the hooks of `old` before and after its forward and backward; their handles remove them from both.

    Args:
        without: hooks that stay with `old` alone; if it has such, handles reach only `old`.
    """
    apart = any(hook in without for hook in hooks_of(old))
    for kind in (*_HOOKS, *_HOW_HOOKS_RUN):
        kept = getattr(old, kind)
        if apart and isinstance(kept, dict):
            kept = type(kept)((key, value) for key, value in kept.items() if value not in without)
        setattr(new, kind, kept)


def names_of(module: torch.nn.Module) -> list[str]:
    """Names of all that a module itself holds, torch's own tables included."""
    return [*vars(module), *module._parameters, *module._buffers, *module._modules]


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a buffer is part of the module's state."""
    return name not in module._non_persistent_buffers_set


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """A module's children by each of their names: `named_children` tells of one that it holds twice only once."""
    return {name: child for name, child in module._modules.items() if child is not None}
