"""Parameter names of the operators that analyses and rules look at, and how torch's layers map to them.

torch's built-in functions have no inspectable signature, so the few names that matter are written down once, here.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import nn


class Form(Enum):
    """How a call is spelled: one name can take its arguments in another order in each of these."""

    ATEN = "torch.f, torch.ops.aten.f: the order of torch's schema"
    PYTHON = "torch.nn.functional.f and other functions written in Python"
    METHOD = "Tensor.f: the tensor first, the rest in the schema's order"


@dataclass(frozen=True)
class Signature:
    """Parameter names in order (and those given by name only), their defaults, the parameter that takes varargs, and
    other keyword spellings."""

    names: tuple[str, ...]
    named: tuple[str, ...]
    defaults: Mapping[str, Any]
    variadic: str | None = None
    renames: Mapping[str, str] = field(default_factory=dict)


_RENAMES = {
    "self": "input",
    "axis": "dim",
    "mat2": "other",
    "tensor2": "other",
    "exponent": "other",
    "split_size_or_sections": "split_size",
    "split_sizes": "split_size",
    "train": "training",
}
_OWN_RENAMES = {
    "matmul": {"vec2": "other"},
    "max": {"other": "dim"},
    "min": {"other": "dim"},
    "any": {"dims": "dim"},
    "reshape": {"shape": "size"},
    "view": {"dtype": "size"},
    "transpose": {"axis0": "dim0", "axis1": "dim1"},
    "repeat": {"repeats": "size"},
    "tile": {"dims": "size"},
    "where": {"x": "input", "y": "other"},
    "scatter": {"value": "src"},
    "split": {"tensor": "input"},
    "tensor_split": {"indices": "indices_or_sections", "sections": "indices_or_sections",
                     "tensor_indices_or_sections": "indices_or_sections"},
    "embedding": {"indices": "input"},
    "one_hot": {"tensor": "input"},
    "instance_norm": {"use_input_stats": "training"},
    "tensor": {"t": "data"},
    "as_tensor": {"t": "data"},
    "scalar_tensor": {"s": "data"},
    "copy": {"other": "src"},
}  # fmt: skip
"""Keywords of one operator that mean a parameter of another name."""
VALUELESS = frozenset({
    "device", "dtype", "layout", "pin_memory", "requires_grad", "memory_format", "generator", "non_blocking", "copy",
    "sparse_grad", "output_size", "_stacklevel", "cudnn_enabled", "cudnn_enable", "names", "implicit",
})  # fmt: skip
"""Keywords that change where or in which type a result is stored (its node knows the type), not what is computed."""

_UNARY = [
    "abs",
    "neg",
    "sign",
    "sgn",
    "round",
    "floor",
    "ceil",
    "trunc",
    "frac",
    "logical_not",
    "bitwise_not",
    "contiguous",
    "detach",
    "clone",
    "float",
    "double",
    "half",
    "bfloat16",
    "bool",
    "int",
    "long",
    "short",
    "byte",
    "char",
    "cpu",
    "cuda",
    "sigmoid",
    "tanh",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "square",
    "sin",
    "cos",
    "erf",
    "log_sigmoid",
    "alias",
    "lift_fresh_copy",
    "softsign",
    "reciprocal",
    "isnan",
    "isinf",
    "isfinite",
    "identity",
    "zero",
    "mT",
    "T",
]
_BINARY = [
    "mul",
    "rsub",
    "pow",
    "floor_divide",
    "maximum",
    "minimum",
    "ge",
    "gt",
    "le",
    "lt",
    "eq",
    "ne",
    "logical_and",
    "logical_or",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "matmul",
]
_NORM_STATS = "running_mean=None running_var=None weight=None bias=None"
_ATEN_STATS = "weight=None bias=None running_mean=None running_var=None"
_CONV = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
_MAX_POOL = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
_AVG_POOL = "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True divisor_override=None"
_OTHERS = {
    "add": "input other alpha=1",
    "sub": "input other alpha=1",
    "div": "input other rounding_mode=None",
    "relu": "input inplace=False",
    "leaky_relu": "input negative_slope=0.01 inplace=False",
    "relu6": "input inplace=False",
    "silu": "input inplace=False",
    "mish": "input inplace=False",
    "selu": "input inplace=False",
    "hardsigmoid": "input inplace=False",
    "elu": "input alpha=1.0 inplace=False",
    "celu": "input alpha=1.0 inplace=False",
    "gelu": "input approximate='none'",
    "softplus": "input beta=1.0 threshold=20.0",
    "hardtanh": "input min_val=-1.0 max_val=1.0 inplace=False",
    "clamp": "input min=None max=None",
    "clamp_min": "input min",
    "clamp_max": "input max",
    "threshold": "input threshold value inplace=False",
    "where": "condition input=None other=None",
    "masked_fill": "input mask value",
    "masked_scatter": "input mask source",
    "heaviside": "input values",
    "softmax": "input dim dtype=None",
    "log_softmax": "input dim dtype=None",
    "dropout": "input p=0.5 training=True inplace=False",
    "dropout1d": "input p=0.5 training=True inplace=False",
    "dropout2d": "input p=0.5 training=True inplace=False",
    "dropout3d": "input p=0.5 training=True inplace=False",
    "alpha_dropout": "input p=0.5 training=False inplace=False",
    "batch_norm": "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-05",
    "layer_norm": "input normalized_shape weight=None bias=None eps=1e-05",
    "group_norm": "input num_groups weight=None bias=None eps=1e-05",
    "instance_norm": f"input {_NORM_STATS} training=True momentum=0.1 eps=1e-05",
    "local_response_norm": "input size alpha=0.0001 beta=0.75 k=1.0",
    "bilinear": "input1 input2 weight bias=None",
    "rms_norm": "input normalized_shape weight=None eps=None",
    "linear": "input weight bias=None",
    "conv1d": _CONV,
    "conv2d": _CONV,
    "conv3d": _CONV,
    "conv_transpose1d": "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1",
    "conv_transpose2d": "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1",
    "conv_transpose3d": "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1",
    "addmm": "input mat1 mat2 * beta=1 alpha=1",
    "baddbmm": "input batch1 batch2 * beta=1 alpha=1",
    "scaled_dot_product_attention":
        "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
    "embedding": "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False",
    "max_pool1d": _MAX_POOL,
    "max_pool2d": _MAX_POOL,
    "max_pool3d": _MAX_POOL,
    "adaptive_max_pool1d": "input output_size return_indices=False",
    "adaptive_max_pool2d": "input output_size return_indices=False",
    "adaptive_max_pool3d": "input output_size return_indices=False",
    "avg_pool1d": _AVG_POOL,
    "avg_pool2d": _AVG_POOL,
    "avg_pool3d": _AVG_POOL,
    "adaptive_avg_pool1d": "input output_size",
    "adaptive_avg_pool2d": "input output_size",
    "adaptive_avg_pool3d": "input output_size",
    "pad": "input pad mode='constant' value=None",
    "interpolate": "input size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None "
    "antialias=False",
    "im2col": "input kernel_size dilation padding stride",
    "mean": "input dim=None keepdim=False dtype=None",
    "sum": "input dim=None keepdim=False dtype=None",
    "amax": "input dim=None keepdim=False",
    "amin": "input dim=None keepdim=False",
    "max": "input dim=None keepdim=False",
    "min": "input dim=None keepdim=False",
    "argmax": "input dim=None keepdim=False",
    "argmin": "input dim=None keepdim=False",
    "any": "input dim=None keepdim=False",
    "all": "input dim=None keepdim=False",
    "cumsum": "input dim dtype=None",
    "one_hot": "input num_classes=-1",
    "bernoulli": "input p=None",
    "to": "input other=None second=None third=None fourth=None",
    "requires_grad": "input requires_grad=True",
    "getattr": "input name",
    "type_as": "input other",
    "type": "input dtype=None non_blocking=None",
    "flatten": "input start_dim=0 end_dim=-1",
    "unflatten": "input dim sizes",
    "transpose": "input dim0 dim1",
    "t": "input",
    "movedim": "input source destination",
    "squeeze": "input dim=None",
    "unsqueeze": "input dim",
    "view_as": "input other",
    "reshape_as": "input other",
    "expand_as": "input other",
    "narrow": "input dim start length",
    "select": "input dim index",
    "index_select": "input dim index",
    "gather": "input dim index",
    "masked_select": "input mask",
    "roll": "input shifts dims=None",
    "flip": "input dims",
    "repeat_interleave": "input repeats=None dim=None",
    "tril": "input diagonal=0",
    "triu": "input diagonal=0",
    "diagonal": "input offset=0 dim1=0 dim2=1",
    "unfold": "input dimension size step",
    "cat": "tensors dim=0",
    "stack": "tensors dim=0",
    "hstack": "tensors",
    "vstack": "tensors",
    "chunk": "input chunks dim=0",
    "split": "input split_size dim=0",
    "tensor_split": "input indices_or_sections dim=0",
    "unbind": "input dim=0",
    "getitem": "input index",
    "setitem": "input index value",
    "copy": "input src non_blocking=False",
    "fill": "input value",
    "index_put": "input indices values accumulate=False",
    "index_copy": "input dim index source",
    "index_fill": "input dim index value",
    "index_add": "input dim index source alpha=1",
    "scatter": "input dim index src",
    "scatter_add": "input dim index src",
    "uniform": "input from=0.0 to=1.0",
    "zeros_like": "input",
    "ones_like": "input",
    "full_like": "input fill_value",
    "empty_like": "input",
    "rand_like": "input",
    "randn_like": "input",
    "new_full": "input size fill_value",
    "full": "size fill_value",
    "tensor": "data",
    "as_tensor": "data",
    "scalar_tensor": "data",
}
_VARIADIC = {
    "view": "input size",
    "reshape": "input size",
    "permute": "input dims",
    "expand": "input size",
    "repeat": "input size",
    "tile": "input size",
    "new_zeros": "input size",
    "new_ones": "input size",
    "new_empty": "input size",
    "zeros": "size",
    "ones": "size",
    "empty": "size",
    "rand": "size",
    "randn": "size",
}


_OTHER_FORMS = {
    (Form.METHOD, "where"): "input condition other",
    (Form.ATEN, "batch_norm"): f"input {_ATEN_STATS} training momentum eps cudnn_enabled=None",
    (Form.ATEN, "instance_norm"): f"input {_ATEN_STATS} training momentum eps cudnn_enabled=None",
    (Form.ATEN, "dropout"): "input p training",
    (Form.ATEN, "alpha_dropout"): "input p training",
    (Form.ATEN, "embedding"): "weight input padding_idx=-1 scale_grad_by_freq=False sparse=False",
    (Form.ATEN, "elu"): "input alpha=1 scale=1 input_scale=1",
    (Form.ATEN, "adaptive_max_pool1d"): "input output_size return_indices=True",
    (Form.ATEN, "adaptive_max_pool2d"): "input output_size return_indices=True",
    (Form.ATEN, "adaptive_max_pool3d"): "input output_size return_indices=True",
    (Form.PYTHON, "softmax"): "input dim=None _stacklevel=3 dtype=None",
    (Form.PYTHON, "log_softmax"): "input dim=None _stacklevel=3 dtype=None",
    (Form.PYTHON, "im2col"): "input kernel_size dilation=1 padding=0 stride=1",
}
"""Where a form differs from the operator's entry above, which speaks for all others."""


def _parse(name: str, text: str, variadic: bool = False) -> Signature:
    places, _, by_name = text.partition(" * ")
    defaults = {}
    for part in f"{places} {by_name}".split():
        parameter, _, default = part.partition("=")
        if default:
            defaults[parameter] = ast.literal_eval(default)
    names, named = (tuple(part.partition("=")[0] for part in half.split()) for half in (places, by_name))
    renames = {**_RENAMES, **_OWN_RENAMES.get(name, {})}
    return Signature(names, named, defaults, names[-1] if variadic else None, renames)


SIGNATURES: dict[str, Signature] = {
    **{name: _parse(name, "input") for name in _UNARY},
    **{name: _parse(name, "input other") for name in _BINARY},
    **{name: _parse(name, text) for name, text in _OTHERS.items()},
    **{name: _parse(name, text, variadic=True) for name, text in _VARIADIC.items()},
}
_FORMS = {(form, name): _parse(name, text) for (form, name), text in _OTHER_FORMS.items()}


def signature_of(name: str, form: Form) -> Signature | None:
    """The parameters of a canonical operator in one form, None if they are not known."""
    return _FORMS.get((form, name)) or SIGNATURES.get(name)


def _from_attributes(*names: str) -> Callable[[Any, nn.Module], dict[str, Any]]:
    """Reads an operator's arguments from the attributes of the layer that calls it."""

    def read(value: Any, module: nn.Module) -> dict[str, Any]:
        return {"input": value, **{name: getattr(module, name) for name in names}}

    return read


def _dropout(value: Any, module: nn.Module) -> dict[str, Any]:
    return {"input": value, "p": module.p, "training": module.training, "inplace": module.inplace}


def _batch_norm(value: Any, module: nn.Module) -> dict[str, Any]:
    use_batch = module.training or (module.running_mean is None and module.running_var is None)
    names = ("running_mean", "running_var", "weight", "bias", "momentum", "eps")
    return {"input": value, **{name: getattr(module, name) for name in names}, "training": use_batch}


def _upsample(value: Any, module: nn.Module) -> dict[str, Any]:
    names = ("size", "scale_factor", "mode", "align_corners")
    return {"input": value, **{name: getattr(module, name) for name in names}}


def _padding(value: Any, module: nn.Module) -> dict[str, Any]:
    return {"input": value, "pad": module.padding, "mode": "constant", "value": getattr(module, "value", 0.0)}


def _unflatten(value: Any, module: nn.Module) -> dict[str, Any]:
    return {"input": value, "dim": module.dim, "sizes": module.unflattened_size}


_conv = _from_attributes("weight", "bias", "stride", "padding", "dilation", "groups", "padding_mode")
_max_pool = _from_attributes("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_avg_pool = _from_attributes("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_avg_pool1d = _from_attributes("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_output_size = _from_attributes("output_size")
_max_output_size = _from_attributes("output_size", "return_indices")
_plain = _from_attributes()
_inplace = _from_attributes("inplace")

MODULE_OPS: dict[type[nn.Module], tuple[str, Callable[[Any, nn.Module], dict[str, Any]]]] = {
    nn.Conv1d: ("conv1d", _conv),
    nn.Conv2d: ("conv2d", _conv),
    nn.Conv3d: ("conv3d", _conv),
    nn.Linear: ("linear", _from_attributes("weight", "bias")),
    nn.BatchNorm1d: ("batch_norm", _batch_norm),
    nn.BatchNorm2d: ("batch_norm", _batch_norm),
    nn.BatchNorm3d: ("batch_norm", _batch_norm),
    nn.LayerNorm: ("layer_norm", _from_attributes("normalized_shape", "weight", "bias", "eps")),
    nn.GroupNorm: ("group_norm", _from_attributes("num_groups", "weight", "bias", "eps")),
    nn.MaxPool1d: ("max_pool1d", _max_pool),
    nn.MaxPool2d: ("max_pool2d", _max_pool),
    nn.MaxPool3d: ("max_pool3d", _max_pool),
    nn.AdaptiveMaxPool1d: ("adaptive_max_pool1d", _max_output_size),
    nn.AdaptiveMaxPool2d: ("adaptive_max_pool2d", _max_output_size),
    nn.AvgPool1d: ("avg_pool1d", _avg_pool1d),
    nn.AvgPool2d: ("avg_pool2d", _avg_pool),
    nn.AvgPool3d: ("avg_pool3d", _avg_pool),
    nn.AdaptiveAvgPool1d: ("adaptive_avg_pool1d", _output_size),
    nn.AdaptiveAvgPool2d: ("adaptive_avg_pool2d", _output_size),
    nn.AdaptiveAvgPool3d: ("adaptive_avg_pool3d", _output_size),
    nn.Dropout: ("dropout", _dropout),
    nn.Dropout1d: ("dropout1d", _dropout),
    nn.Dropout2d: ("dropout2d", _dropout),
    nn.Dropout3d: ("dropout3d", _dropout),
    nn.ReLU: ("relu", _inplace),
    nn.ReLU6: ("relu6", _inplace),
    nn.LeakyReLU: ("leaky_relu", _from_attributes("negative_slope", "inplace")),
    nn.GELU: ("gelu", _plain),
    nn.SiLU: ("silu", _inplace),
    nn.Sigmoid: ("sigmoid", _plain),
    nn.Tanh: ("tanh", _plain),
    nn.Softmax: ("softmax", _from_attributes("dim")),
    nn.Identity: ("identity", _plain),
    nn.Flatten: ("flatten", _from_attributes("start_dim", "end_dim")),
    nn.Unflatten: ("unflatten", _unflatten),
    nn.Upsample: ("interpolate", _upsample),
    nn.ZeroPad2d: ("pad", _padding),
    nn.ConstantPad2d: ("pad", _padding),
}
"""Exact layer types; a subclass may compute anything and is not in the table."""
