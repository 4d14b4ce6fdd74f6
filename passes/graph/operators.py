"""What is known of each operator of torch, in one record: its names, its parameters, and what kind of operator it is.

torch's built-in functions have no inspectable signature, so the few names that matter are written down once, here.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, NamedTuple


class Form(Enum):
    """How a call is spelled: one name can take its arguments in another order in each of these."""

    ATEN = "torch.f, torch.ops.aten.f: the order of torch's schema"
    PYTHON = "torch.nn.functional.f and other functions written in Python"
    METHOD = "Tensor.f: the tensor first, the rest in the schema's order"


class Trait(Flag):
    """What kind of operator one is; tests hold this to torch's schemas, its tags, and to values."""

    NONE = 0
    ELEMENTWISE = auto()
    """Each element of the result is made of a few elements of the arguments: nothing is summed, drawn at random or
    moved to another device. Formulas of weights are made of such operators."""
    ALIAS = auto()
    """The result may share memory with the first argument."""
    VIEW = auto()
    """The result holds elements of the first argument, in its memory where the layout allows."""
    PARTS = auto()
    """The result is a tuple of such."""
    CAST = auto()
    """The first argument in another type; it itself where it has that type."""
    MOVES = auto()
    """The result is a tensor of elements of the first argument, in another place, order or number."""
    ROW_MAJOR = auto()
    """They keep their order; only the shape is another."""
    SAME = auto()
    """They keep their places too: the first argument, or a copy."""
    FILL = auto()
    """No value of the first argument is read."""
    SELECTS = auto()
    """Some elements of the first argument are replaced by others: such a weight is masked."""
    RESIZES = auto()
    """In place, it changes the shape or the layout of the tensor that it is given."""
    DROPOUT = auto()
    """In evaluation it is the first argument itself."""
    PRODUCT = auto()
    """A product of matrices or a convolution: of such operators a device takes the most time."""


class Signature(NamedTuple):
    """Parameter names in order (and those given by name only), their defaults, the parameter that takes varargs, and
    other keyword spellings."""

    names: tuple[str, ...]
    named: tuple[str, ...]
    defaults: Mapping[str, Any]
    variadic: str | None
    renames: Mapping[str, str]


class Update(NamedTuple):
    """Arguments that a call writes to although no schema says so, unless another argument has a certain value."""

    arguments: tuple[str, ...]
    unless: str
    value: object


@dataclass(frozen=True, slots=True)
class Operator:
    """The record of one operator.

    Attributes:
        name: the canonical one.
        spellings: every name; whether one writes into the first argument.
        signature: None if its parameters are not known.
        forms: the signatures of the spellings in which it differs.
        traits: what kind of operator it is.
        linear: the arguments whose sum, each times constants, is the result.
        update: what a call writes to besides its first argument.
    """

    name: str = ""
    spellings: Mapping[str, bool] = field(default_factory=dict)
    signature: Signature | None = None
    forms: Mapping[Form, Signature] = field(default_factory=dict)
    traits: Trait = Trait.NONE
    linear: frozenset[str] = frozenset()
    update: Update | None = None


VALUELESS = frozenset({
    "device", "dtype", "layout", "pin_memory", "requires_grad", "memory_format", "generator", "non_blocking", "copy",
    "sparse_grad", "output_size", "_stacklevel", "cudnn_enabled", "cudnn_enable", "names", "implicit",
})  # fmt: skip
"""Keywords that change where or in which type a result is stored (its node knows the type), not what is computed."""
_RENAMES = {
    "self": "input", "axis": "dim", "mat2": "other", "tensor2": "other", "exponent": "other",
    "split_size_or_sections": "split_size", "split_sizes": "split_size", "train": "training",
}  # fmt: skip
"""Keywords of any operator that mean a parameter of another name."""

_CONV = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
_CONV_TRANSPOSE = "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1"
_MAX_POOL = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
_AVG_POOL = "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True divisor_override=None"
_DROPOUT = "input p=0.5 training=True inplace=False"
_ATEN_STATS = "weight=None bias=None running_mean=None running_var=None training momentum eps cudnn_enabled=None"
_STATISTICS = Update(("running_mean", "running_var"), "training", False)

_MATHS = Trait.ELEMENTWISE
_VIEW = Trait.ELEMENTWISE | Trait.ALIAS | Trait.VIEW
_MOVED_VIEW = _VIEW | Trait.MOVES
_SAME_VIEW = _MOVED_VIEW | Trait.ROW_MAJOR | Trait.SAME
_PARTS = _VIEW | Trait.PARTS
_COPY = Trait.ELEMENTWISE | Trait.MOVES
_CAST = Trait.ELEMENTWISE | Trait.ALIAS | Trait.CAST
# on another device, or with another history
_PLACED = Trait.ALIAS | Trait.MOVES | Trait.ROW_MAJOR | Trait.SAME
_FILL = Trait.ELEMENTWISE | Trait.FILL
_SELECTS = Trait.ELEMENTWISE | Trait.SELECTS
_DROPS = Trait.ALIAS | Trait.DROPOUT


def _op(
    names: str,
    parameters: str | None,
    traits: Trait = Trait.NONE,
    *,
    linear: str = "",
    update: Update | None = None,
    renames: Mapping[str, str] | None = None,
    forms: Mapping[Form, str] | None = None,
) -> Operator:
    """One record.

    Args:
        names: the canonical one first; a `=` marks one that writes into the first argument.
        parameters: with defaults; what follows a lone `*` is given by name, and `*size` takes the arguments left.
    """
    renames = {**_RENAMES, **(renames or {})}
    return Operator(
        names.split()[0].removesuffix("="),
        {name.removesuffix("="): name.endswith("=") for name in names.split()},
        None if parameters is None else _parsed(parameters, renames),
        {form: _parsed(text, renames) for form, text in (forms or {}).items()},
        traits,
        frozenset(linear.split() or ["input"] * bool(traits & (Trait.MOVES | Trait.CAST))),
        update,
    )


def _alike(names: str, *record: Any, **options: Any) -> Iterator[Operator]:
    """Records of operators that differ in their names only."""
    return (_op(name, *record, **options) for name in names.split())


def _parsed(text: str, renames: Mapping[str, str]) -> Signature:
    places, _, by_name = text.partition(" * ")
    parts = [part.partition("=") for part in f"{places} {by_name}".split()]
    names, named = (tuple(part.partition("=")[0].lstrip("*") for part in half.split()) for half in (places, by_name))
    defaults = {name: ast.literal_eval(default) for name, _, default in parts if default}
    return Signature(names, named, defaults, names[-1] if "*" in places else None, renames)


_RECORDS = (
    # arithmetic
    _op("add __add__ __radd__ iadd= __iadd__=", "input other alpha=1", _MATHS, linear="input other"),
    _op("sub subtract __sub__ isub= __isub__=", "input other alpha=1", _MATHS, linear="input other"),
    _op("rsub __rsub__", "input other", _MATHS, linear="input other"),
    _op("mul multiply __mul__ __rmul__ imul= __imul__=", "input other", _MATHS, linear="input other"),
    _op(
        "div divide true_divide truediv __truediv__ itruediv= __itruediv__=", "input other rounding_mode=None", _MATHS,
        linear="input",
    ),
    _op("floor_divide floordiv __floordiv__ ifloordiv= __ifloordiv__=", "input other", _MATHS),
    _op("pow __pow__ ipow= __ipow__=", "input other", _MATHS),
    _op("neg negative __neg__", "input", _MATHS, linear="input"),
    _op("abs absolute __abs__", "input", _MATHS),
    _op("round __round__", "input", _MATHS),
    _op("sigmoid expit special_expit", "input", _MATHS),
    _op("clamp clip", "input min=None max=None", _MATHS),
    _op("clamp_min", "input min", _MATHS),
    _op("clamp_max", "input max", _MATHS),
    _op("hardtanh", "input min_val=-1.0 max_val=1.0 inplace=False", _MATHS),
    _op("threshold", "input threshold value inplace=False", _MATHS),
    _op("leaky_relu", "input negative_slope=0.01 inplace=False", _MATHS),
    _op(
        "elu", "input alpha=1.0 inplace=False", _MATHS, forms={Form.ATEN: "input alpha=1 scale=1 input_scale=1"}
    ),
    _op("celu", "input alpha=1.0 inplace=False", _MATHS),
    _op("gelu", "input approximate='none'", _MATHS),
    _op("softplus", "input beta=1.0 threshold=20.0", _MATHS),
    _op("heaviside", "input values", _MATHS),
    *_alike("sign sgn floor ceil trunc frac square sqrt rsqrt reciprocal", "input", _MATHS),
    *_alike("exp log sin cos tanh erf log_sigmoid softsign", "input", _MATHS),
    *_alike("relu relu6 silu mish selu hardsigmoid", "input inplace=False", _MATHS),
    *_alike("maximum minimum", "input other", _MATHS),
    # comparison, logic
    _op("ge greater_equal __ge__", "input other", _MATHS),
    _op("gt greater __gt__", "input other", _MATHS),
    _op("le less_equal __le__", "input other", _MATHS),
    _op("lt less __lt__", "input other", _MATHS),
    _op("eq __eq__", "input other", _MATHS),
    _op("ne not_equal __ne__", "input other", _MATHS),
    _op("bitwise_and and and_ __and__ iand= __iand__=", "input other", _MATHS),
    _op("bitwise_or or or_ __or__ ior= __ior__=", "input other", _MATHS),
    _op("bitwise_xor xor __xor__ ixor= __ixor__=", "input other", _MATHS),
    _op("bitwise_not invert inv __invert__", "input", _MATHS),
    *_alike("logical_and logical_or logical_xor", "input other", _MATHS),
    *_alike("logical_not isnan isinf isfinite", "input", _MATHS),
    # elements taken from elsewhere, in place or not
    _op(
        "where", "condition input=None other=None", _SELECTS, linear="input other",
        renames={"x": "input", "y": "other"}, forms={Form.METHOD: "input condition other"},
    ),
    _op("masked_fill", "input mask value", _SELECTS, linear="input"),
    _op("masked_scatter", "input mask source", _SELECTS, linear="input source"),
    _op("index_put", "input indices values accumulate=False", _SELECTS, linear="input values"),
    _op("index_copy", "input dim index source", _SELECTS, linear="input source"),
    _op("index_fill", "input dim index value", _SELECTS, linear="input"),
    _op("scatter", "input dim index src", _SELECTS, linear="input src", renames={"value": "src"}),
    _op("setitem= __setitem__=", "input index value", _SELECTS, linear="input value"),
    _op("index_add", "input dim index source alpha=1"),
    _op("scatter_add", "input dim index src"),
    _op("copy", "input src non_blocking=False", renames={"other": "src"}),
    _op("fill", "input value"),
    _op("zero", "input"),
    # views
    _op("view", "input *size", _MOVED_VIEW | Trait.ROW_MAJOR, renames={"dtype": "size"}),
    _op("reshape", "input *size", _MOVED_VIEW | Trait.ROW_MAJOR, renames={"shape": "size"}),
    _op("flatten", "input start_dim=0 end_dim=-1", _MOVED_VIEW | Trait.ROW_MAJOR),
    _op("unflatten", "input dim sizes", _MOVED_VIEW | Trait.ROW_MAJOR),
    *_alike("view_as reshape_as", "input other", _MOVED_VIEW | Trait.ROW_MAJOR),
    _op("squeeze", "input dim=None", _MOVED_VIEW | Trait.ROW_MAJOR | Trait.RESIZES),
    _op("unsqueeze", "input dim", _MOVED_VIEW | Trait.ROW_MAJOR | Trait.RESIZES),
    *_alike("identity detach contiguous alias", "input", _SAME_VIEW),
    _op("permute", "input *dims", _MOVED_VIEW),
    _op(
        "transpose swapaxes swapdims", "input dim0 dim1", _MOVED_VIEW | Trait.RESIZES,
        renames={"axis0": "dim0", "axis1": "dim1"},
    ),
    _op("t", "input", _MOVED_VIEW | Trait.RESIZES),
    *_alike("T mT", "input", _MOVED_VIEW),
    _op("movedim moveaxis", "input source destination", _MOVED_VIEW),
    _op("expand broadcast_to", "input *size", _MOVED_VIEW),
    _op("expand_as", "input other", _MOVED_VIEW),
    _op("narrow", "input dim start length", _MOVED_VIEW),
    _op("select", "input dim index", _MOVED_VIEW),
    _op("diagonal", "input offset=0 dim1=0 dim2=1", _MOVED_VIEW),
    _op("unfold", "input dimension size step", _MOVED_VIEW),
    _op("getitem __getitem__", "input index", _VIEW),
    _op("getattr", "input name", _VIEW),
    _op("chunk", "input chunks dim=0", _PARTS),
    _op("split", "input split_size dim=0", _PARTS, renames={"tensor": "input"}),
    _op(
        "tensor_split", "input indices_or_sections dim=0", _PARTS,
        renames=dict.fromkeys(("indices", "sections", "tensor_indices_or_sections"), "indices_or_sections"),
    ),
    _op("unbind", "input dim=0", _PARTS),
    *_alike("as_strided resize resize_as set", None, Trait.RESIZES),
    # copies, casts
    *_alike("clone lift_fresh_copy", "input", _COPY | Trait.ROW_MAJOR | Trait.SAME),
    *_alike("cpu cuda", "input", _PLACED),
    _op("requires_grad", "input requires_grad=True", _PLACED),
    _op("repeat", "input *size", _COPY, renames={"repeats": "size"}),
    _op("tile", "input *size", _COPY, renames={"dims": "size"}),
    _op("roll", "input shifts dims=None", _COPY),
    _op("flip", "input dims", _COPY),
    _op("index_select", "input dim index", _COPY),
    _op("gather", "input dim index", _COPY),
    _op("take_along_dim", "input indices dim=None", _COPY),
    _op("masked_select", "input mask", Trait.MOVES),
    _op("repeat_interleave", "input repeats=None dim=None", _MATHS, linear="input"),
    *_alike("tril triu", "input diagonal=0", _MATHS),
    _op("cat concat concatenate", "tensors dim=0"),
    _op("stack", "tensors dim=0"),
    *_alike("hstack vstack", "tensors"),
    _op("to _to_copy", "input other=None second=None third=None fourth=None", _CAST),
    _op("type_as", "input other", _CAST),
    _op("type", "input dtype=None non_blocking=None", _CAST),
    _op("as_tensor", "data", _CAST, renames={"t": "data"}),
    *_alike("float double half bfloat16 bool int long short byte char", "input", _CAST),
    # tensors made of numbers, or at random
    *_alike("zeros_like ones_like", "input", _FILL),
    _op("full_like", "input fill_value", _FILL),
    *_alike("new_zeros new_ones", "input *size", _FILL),
    _op("new_full", "input size fill_value", _FILL),
    *_alike("zeros ones", "*size", _FILL),
    _op("full", "size fill_value", _FILL),
    _op("empty_like", "input"),
    _op("new_empty", "input *size"),
    _op("empty", "*size"),
    _op("tensor", "data", renames={"t": "data"}),
    _op("scalar_tensor", "data", renames={"s": "data"}),
    _op("one_hot", "input num_classes=-1", renames={"tensor": "input"}),
    *_alike("rand randn", "*size"),
    *_alike("rand_like randn_like", "input"),
    _op("bernoulli", "input p=None"),
    _op("uniform", "input from=0.0 to=1.0"),
    _op("dropout", _DROPOUT, _DROPS, forms={Form.ATEN: "input p training"}),
    *_alike("dropout1d dropout2d dropout3d", _DROPOUT, _DROPS),
    *_alike(
        "alpha_dropout feature_alpha_dropout", "input p=0.5 training=False inplace=False", _DROPS,
        forms={Form.ATEN: "input p training"},
    ),
    # products
    _op("matmul __matmul__ mm bmm imatmul=", "input other", Trait.PRODUCT, renames={"vec2": "other"}),
    _op("linear", "input weight bias=None", Trait.PRODUCT),
    _op("bilinear", "input1 input2 weight bias=None", Trait.PRODUCT),
    _op("addmm", "input mat1 mat2 * beta=1 alpha=1", Trait.PRODUCT),
    _op("baddbmm", "input batch1 batch2 * beta=1 alpha=1", Trait.PRODUCT),
    *_alike("conv1d conv2d conv3d", _CONV, Trait.PRODUCT),
    *_alike("conv_transpose1d conv_transpose2d conv_transpose3d", _CONV_TRANSPOSE, Trait.PRODUCT),
    _op(
        "scaled_dot_product_attention",
        "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
        Trait.PRODUCT,
    ),
    _op(
        "embedding",
        "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False",
        update=Update(("weight",), "max_norm", None),
        renames={"indices": "input"},
        forms={Form.ATEN: "weight input padding_idx=-1 scale_grad_by_freq=False sparse=False"},
    ),
    # normalisation
    _op(
        "batch_norm",
        "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-05",
        update=_STATISTICS,
        forms={Form.ATEN: f"input {_ATEN_STATS}"},
    ),
    _op(
        "instance_norm",
        "input running_mean=None running_var=None weight=None bias=None training=True momentum=0.1 eps=1e-05",
        update=_STATISTICS,
        renames={"use_input_stats": "training"},
        forms={Form.ATEN: f"input {_ATEN_STATS}"},
    ),
    _op("layer_norm", "input normalized_shape weight=None bias=None eps=1e-05"),
    _op("group_norm", "input num_groups weight=None bias=None eps=1e-05"),
    _op("rms_norm", "input normalized_shape weight=None eps=None"),
    _op("local_response_norm", "input size alpha=0.0001 beta=0.75 k=1.0"),
    # pooling, padding
    *_alike("max_pool1d max_pool2d max_pool3d", _MAX_POOL),
    *_alike(
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", "input output_size return_indices=False",
        forms={Form.ATEN: "input output_size return_indices=True"},
    ),
    *_alike("avg_pool1d avg_pool2d avg_pool3d", _AVG_POOL),
    _op("adaptive_avg_pool1d", "input output_size"),
    _op("adaptive_avg_pool2d _adaptive_avg_pool2d", "input output_size"),
    _op("adaptive_avg_pool3d _adaptive_avg_pool3d", "input output_size"),
    _op("pad", "input pad mode='constant' value=None"),
    _op(
        "interpolate",
        "input size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None "
        "antialias=False",
    ),
    _op(
        "im2col",
        "input kernel_size dilation padding stride",
        forms={Form.PYTHON: "input kernel_size dilation=1 padding=0 stride=1"},
    ),
    # reductions
    *_alike("mean sum", "input dim=None keepdim=False dtype=None"),
    *_alike("amax amin argmax argmin all", "input dim=None keepdim=False"),
    _op("any", "input dim=None keepdim=False", renames={"dims": "dim"}),
    *_alike("max min", "input dim=None keepdim=False", renames={"other": "dim"}),
    _op("cumsum", "input dim dtype=None"),
    *_alike(
        "softmax log_softmax", "input dim dtype=None",
        forms={Form.PYTHON: "input dim=None _stacklevel=3 dtype=None"},
    ),
)  # fmt: skip
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _RECORDS}
"""By canonical name."""
_UNKNOWN = Operator()
_SPELLINGS = {raw: (record.name, writes) for record in _RECORDS for raw, writes in record.spellings.items()}


OWN_PRODUCTS = tuple(
    f"sparsecomp::{name}"
    for name in ("sparse_linear", "sparse_matmul", "spike_linear", "spike_conv", "spike_matmul",
                 "spike_conv_transpose", "folded_linear", "dense_linear_relu", "active_linear", "block_attention",
                 "decode_attention", "masked_decode", "element_attention", "packed_linear", "packed_pair",
                 "gated_pair", "bitmap_linear", "bitmap_pair", "siblings", "spike_attention", "counted_attention")
)  # fmt: skip
"""Our matrix products and convolutions, some with an activation; by name, since an analysis loads no operators."""


def spelled_as(trait: Trait) -> tuple[str, ...]:
    """The operators that have a trait."""
    return tuple(name for name, operator in OPERATORS.items() if operator.traits & trait)


def record_of(name: str) -> Operator:
    """The record of a canonical operator; one that says nothing if there is none."""
    return OPERATORS.get(name, _UNKNOWN)


def spelling_of(raw: str) -> tuple[str, bool]:
    """The canonical name of an operator, and whether this spelling writes into its first argument."""
    if raw in _SPELLINGS:
        return _SPELLINGS[raw]
    if raw.endswith("_") and not raw.endswith("__") and "::" not in raw:
        name, _ = _SPELLINGS.get(raw[:-1], (raw[:-1], True))
        return name, True
    return raw, False


def parameters_of(name: str, form: Form) -> Signature | None:
    """The parameters of a canonical operator in one form, None if they are not known."""
    record = record_of(name)
    return record.forms.get(form, record.signature)
