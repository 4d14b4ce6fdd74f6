"""What is fused behind a product: out = activation(scale · product + bias + residual), rounded once to out's dtype.

Bias and residual that are None are not read: there is no product with zero in their place.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.launch.strided import Strides, dtype_name, random_tensor, strided, strides_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
}  # fmt: skip

_NO_STRIDES = Strides(0, 0, 0)


class Output(NamedTuple):
    """The strides and types of an output (batch, m, n), and how it is finished.

    Attributes:
        strides: of the output by batch, row and column.
        dtype: of the output.
        bias: dtype of the bias, `""` without.
        bias_axis: `"row"` (one number a row) or `"column"`; `""` without a bias.
        residual: dtype of the residual, `""` without.
        residual_strides: as `strides`; zeros without a residual.
        activation: one of `ACTIVATIONS`.
        scale: of the product.
    """

    strides: Strides
    dtype: str
    bias: str
    bias_axis: str
    residual: str
    residual_strides: Strides
    activation: str
    scale: float

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The run-time numbers that kernels take last, in their order."""
        return (*self.strides, *self.residual_strides, self.scale)

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are specialised on."""
        return {"BIAS_ROWS": self.bias_axis == "row", "ACTIVATION": self.activation}

    @property
    def text(self) -> str:
        """For a signature: `"row bias+residual+relu"`, `""` for nothing. Any scale costs the same."""
        parts = (
            self.bias and f"{self.bias_axis} bias {self.bias}", self.residual and f"residual {self.residual}",
            "" if self.activation == "none" else self.activation,
        )  # fmt: skip
        return "+".join(part for part in parts if part)


def output_of(
    out: Tensor, bias: Tensor | None = None, bias_axis: str = "column", residual: Tensor | None = None,
    activation: str = "none", scale: float = 1.0,
) -> Output:  # fmt: skip
    """Describe an output (m, n) or (batch, m, n).

    Raises:
        FormatError: a bias or residual that does not fit `out`, an unknown axis or activation.
    """
    if activation not in ACTIVATIONS:
        raise FormatError(f"activation is {activation!r}, needs one of {', '.join(ACTIVATIONS)}")
    if bias is not None:
        if bias_axis not in ("row", "column"):
            raise FormatError(f"bias_axis is {bias_axis!r}, needs 'row' or 'column'")
        needed = out.shape[-2 if bias_axis == "row" else -1]
        if bias.dim() != 1 or bias.shape[0] != needed or not bias.is_contiguous():
            raise FormatError(f"bias has shape {tuple(bias.shape)}, needs ({needed},), contiguous: one a {bias_axis}")
    if residual is not None and residual.shape != out.shape:
        raise FormatError(f"residual has shape {tuple(residual.shape)}, needs that of out, {tuple(out.shape)}")
    return Output(
        strides_of(out), dtype_name(out), "" if bias is None else dtype_name(bias), "" if bias is None else bias_axis,
        "" if residual is None else dtype_name(residual), _NO_STRIDES if residual is None else strides_of(residual),
        activation, float(scale),
    )  # fmt: skip


def described_output(
    out: Tensor, axis: str, bias: torch.dtype | None, residual: torch.dtype | None, activation: str
) -> Output:
    """`output_of` for a bias by this axis and a residual that lies as `out` does, from their dtypes."""
    length = out.shape[-2 if axis == "row" else -1]
    added = None if bias is None else out.new_empty(length, dtype=bias)
    return output_of(
        out, added, axis, None if residual is None else torch.empty_like(out, dtype=residual), activation, 1.0
    )  # fmt: skip


def output_of_layer(
    n: int, m: int, dtype: torch.dtype, has_bias: bool, has_residual: bool, activation: str
) -> Output:  # fmt: skip
    """That of a layer, (m, n) for n contiguous rows of m numbers, whose operands all have this dtype."""
    out = torch.empty(n, m, dtype=dtype, device="meta").mT
    return described_output(out, "row", dtype if has_bias else None, dtype if has_residual else None, activation)


def output_from_text(text: str, dtype: str, strides: Strides) -> Output:
    """An output whose `text` is this, with a residual laid out like it.

    Raises:
        ValueError: no output has this text.
    """
    fields = {"bias": "", "bias_axis": "", "residual": "", "activation": "none"}
    for part in text.split("+") if text else ():
        words = part.split()
        if words[1:2] == ["bias"]:
            fields |= {"bias_axis": words[0], "bias": words[2]}
        elif words[0] == "residual":
            fields["residual"] = words[1]
        else:
            fields["activation"] = part
    given = strides if fields["residual"] else _NO_STRIDES
    found = Output(strides, dtype, fields["bias"], fields["bias_axis"], fields["residual"], given,
                   fields["activation"], 1.0)  # fmt: skip
    if found.text != text or found.activation not in ACTIVATIONS:
        raise ValueError(f"{text!r} is no epilogue")
    return found


def random_operands(
    output: Output, shape: tuple[int, int, int], random: torch.Generator
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Bias, residual and an output (batch, m, n) full of NaN."""
    length = shape[1] if output.bias_axis == "row" else shape[2]
    bias = random_tensor((length,), (1,), output.bias, random) if output.bias else None
    residual = random_tensor(shape, output.residual_strides, output.residual, random) if output.residual else None
    out = strided(shape, output.strides, lambda n: torch.full((n,), math.nan, dtype=getattr(torch, output.dtype),
                                                              device=random.device))  # fmt: skip
    return bias, residual, out


def finished(output: Output, product: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """The reference: a float64 product (..., m, n) through the epilogue, in float64."""
    value = product * output.scale
    if bias is not None:
        value = value + (bias.double()[:, None] if output.bias_axis == "row" else bias.double())
    if residual is not None:
        value = value + residual.double()
    return ACTIVATIONS[output.activation](value)
