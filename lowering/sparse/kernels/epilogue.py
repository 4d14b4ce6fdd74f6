"""Pieces that the products share: a dot product at the precision of its operands, and what is done with sums."""

import triton
import triton.language as tl


@triton.jit
def finish(
    acc, bias_ptr, residual_ptr, out_ptr, batch, rows, cols, mask,
    out_b, out_m, out_n, res_b, res_m, res_n, scale,
    BIAS_ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out[batch, rows, cols] = activation(scale · acc + bias + residual) under `mask`; acc is float32 (rows, cols).

    bias: (M,) if BIAS_ROWS else (N,), or None. residual: as out, with strides of its own, or None.
    """
    m = rows.to(tl.int64)[:, None]
    n = cols.to(tl.int64)[None, :]
    value = acc * scale
    if bias_ptr is not None:
        if BIAS_ROWS:
            bias = tl.load(bias_ptr + m, mask=mask, other=0.0)
        else:
            bias = tl.load(bias_ptr + n, mask=mask, other=0.0)
        value += bias.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + batch * res_b + m * res_m + n * res_n, mask=mask, other=0.0)
        value += residual.to(tl.float32)
    value = after_activation(value, ACTIVATION)
    out = out_ptr + batch * out_b + m * out_m + n * out_n
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def after_activation(value, ACTIVATION: tl.constexpr):
    """activation(value), in float32."""
    if ACTIVATION == "relu":
        value = tl.where(value < 0.0, 0.0, value)  # NaN stays
    elif ACTIVATION == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # x/2 · (1 + tanh u) = x · sigmoid(2u)
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif ACTIVATION == "silu":
        value = value * tl.sigmoid(value)
    elif ACTIVATION == "sigmoid":
        value = tl.sigmoid(value)
    elif ACTIVATION == "tanh":
        value = _tanh(value)
    return value


@triton.jit
def _tanh(x):
    """tanh(x), in float32; relative to the result as exact near 0 as elsewhere."""
    # Lambert's continued fraction, cut off where it is exact to float32 up to 1
    s = x * x
    near = x * (135135.0 + s * (17325.0 + s * (378.0 + s))) / (135135.0 + s * (62370.0 + s * (3150.0 + 28.0 * s)))
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * tl.abs(x)))
    return tl.where(tl.abs(x) < 1.0, near, tl.where(x < 0.0, -far, far))


FINISH = (finish, after_activation, _tanh)
"""What `finish` is made of."""


@triton.jit
def finish_pair(
    acc, other, bias_ptr, other_bias_ptr, out_ptr, rows, cols, mask, out_m, out_n, ACTIVATION: tl.constexpr
):
    """out[rows, cols] = activation(acc + bias) · (other + other_bias) under `mask`, rounded once; both sums are float32
    (rows, cols), a bias is (M,) or None."""
    m = rows.to(tl.int64)[:, None]
    n = cols.to(tl.int64)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + m, mask=mask, other=0.0).to(tl.float32)
    if other_bias_ptr is not None:
        other += tl.load(other_bias_ptr + m, mask=mask, other=0.0).to(tl.float32)
    value = after_activation(acc, ACTIVATION) * other
    tl.store(out_ptr + m * out_m + n * out_n, value.to(out_ptr.dtype.element_ty), mask=mask)


FINISH_PAIR = (finish_pair, after_activation, _tanh)
"""What `finish_pair` is made of."""


@triton.jit
def flag(acc, mask, bad_ptr):
    """bad[program] = whether a sum under `mask` is not finite, as int8; nothing if bad is None."""
    if bad_ptr is not None:
        # NaN and infinity alone are not equal to themselves less themselves
        odd = tl.where((acc - acc == 0.0) | ~mask, 0, 1)
        tl.store(bad_ptr + tl.program_id(0), tl.max(tl.max(odd, 1), 0).to(tl.int8))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32; see `precision` for PRECISION."""
    if PRECISION == "upcast":
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


def precision(dtype: str) -> str:
    """How operands of `dtype` are multiplied on tensor cores: float32 as three products of TF32.

    The interpreter's products of bfloat16 are wrong, so that it multiplies them as float32.
    """
    if dtype == "bfloat16" and triton.knobs.runtime.interpret:
        return "upcast"
    return "tf32x3" if dtype == "float32" else "ieee"
