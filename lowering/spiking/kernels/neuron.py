"""A described neuron over all time steps, in one pass over memory.

The description is a constant of the kernel, whose instructions Triton unrolls: each is one operation on registers, as
in a kernel written for that neuron. No multiplication is joined with an addition, which would round once where eager
rounds twice, and fire where eager does not.
"""

import triton
import triton.language as tl

from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.spiking.neuron import Neurons
from sparsecomp.lowering.tuning.cost import Cost, sizes
from sparsecomp.lowering.tuning.template import Config, Template
from sparsecomp.reference.neuron import OPERATIONS

_ADD = tl.constexpr(OPERATIONS.index("add"))
_SUB = tl.constexpr(OPERATIONS.index("sub"))
_MUL = tl.constexpr(OPERATIONS.index("mul"))
_DIV = tl.constexpr(OPERATIONS.index("div"))
_NEG = tl.constexpr(OPERATIONS.index("neg"))
_GE = tl.constexpr(OPERATIONS.index("ge"))
_GT = tl.constexpr(OPERATIONS.index("gt"))
_LE = tl.constexpr(OPERATIONS.index("le"))
_LT = tl.constexpr(OPERATIONS.index("lt"))
_NOT = tl.constexpr(OPERATIONS.index("not"))
_FLOAT = tl.constexpr(OPERATIONS.index("float"))
_FIRE = tl.constexpr(OPERATIONS.index("fire"))
_STOP = tl.constexpr(OPERATIONS.index("stop"))
_BFLOAT16 = tl.constexpr(OPERATIONS.index("bfloat16"))
_FLOAT16 = tl.constexpr(OPERATIONS.index("float16"))
_ABS = tl.constexpr(OPERATIONS.index("abs"))
_EXP = tl.constexpr(OPERATIONS.index("exp"))
_SQRT = tl.constexpr(OPERATIONS.index("sqrt"))
_SIGMOID = tl.constexpr(OPERATIONS.index("sigmoid"))
_MAX = tl.constexpr(OPERATIONS.index("max"))
_MIN = tl.constexpr(OPERATIONS.index("min"))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_bfloat16(a):
    """float32 rounded to the nearest bfloat16, of two as near to the even one; the interpreter's cast cuts off."""
    if _INTERPRETED:
        bits = a.to(tl.int32, bitcast=True)
        even = (bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000
        return tl.where(a == a, even, bits).to(tl.float32, bitcast=True)
    else:
        return a.to(tl.bfloat16).to(tl.float32)


@triton.jit
def do_instruction(OPERATION: tl.constexpr, a, b, c):
    """One instruction, on values of one shape."""
    if OPERATION == _ADD:
        return a + b
    elif OPERATION == _SUB:
        return a - b
    elif OPERATION == _MUL:
        return a * b
    elif OPERATION == _DIV:
        return tl.div_rn(a, b)
    elif OPERATION == _NEG:
        return -a
    elif OPERATION == _GE:
        return a >= b
    elif OPERATION == _GT:
        return a > b
    elif OPERATION == _LE:
        return a <= b
    elif OPERATION == _LT:
        return a < b
    elif OPERATION == _NOT:
        return a == 0
    elif OPERATION == _FLOAT or OPERATION == _FIRE:  # noqa: SIM109  (Triton has no `in`)
        return a.to(tl.float32)
    elif OPERATION == _STOP:
        return a
    elif OPERATION == _BFLOAT16:
        return to_bfloat16(a)
    elif OPERATION == _FLOAT16:
        return a.to(tl.float16).to(tl.float32)
    elif OPERATION == _ABS:
        return tl.abs(a)
    elif OPERATION == _EXP:
        return tl.exp(a)
    elif OPERATION == _SQRT:
        return tl.sqrt_rn(a)
    elif OPERATION == _SIGMOID:
        return 1.0 / (1.0 + tl.exp(-a))
    elif OPERATION == _MAX:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == _MIN:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where(a, b, c)


@triton.jit
def state_before(pointer, start, offset, mask, zero):
    """A state before the first step."""
    if pointer is not None:
        return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
    else:
        return zero + start


@triton.jit
def parameter_of(pointer, place, mask, zero):
    """What each element reads of a parameter, by its place in it."""
    if pointer is not None:
        return tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)
    else:
        return zero


@triton.jit
def what_stays(
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, size0, stride0, size1, stride1, size2, stride2,
    size3, stride3, size4, stride4, size5, stride5, n0, n1, n2, n3, n4, n5, n6, n7, offset, mask, zero,
    WIDE: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """What a description reads that is the same in all steps: parameters, and numbers.

    ALIKE: of each parameter the first that has its size and stride, so that one division serves both.
    """
    place = offset if WIDE else offset.to(tl.int32)
    sizes = (size0, size1, size2, size3, size4, size5)
    strides = (stride0, stride1, stride2, stride3, stride4, stride5)
    at = ()
    for one in tl.static_range(len(ALIKE)):
        if ALIKE[one] == one:
            at = at + (place // strides[one] % sizes[one],)
        else:
            at = at + (at[ALIKE[one]],)
    return (
        parameter_of(p0_ptr, at[0], mask, zero), parameter_of(p1_ptr, at[1], mask, zero),
        parameter_of(p2_ptr, at[2], mask, zero), parameter_of(p3_ptr, at[3], mask, zero),
        parameter_of(p4_ptr, at[4], mask, zero), parameter_of(p5_ptr, at[5], mask, zero),
        zero + n0, zero + n1, zero + n2, zero + n3, zero + n4, zero + n5, zero + n6, zero + n7,
    )  # fmt: skip


@triton.jit
def neuron_kernel(
    x_ptr, v0_ptr, v1_ptr, p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, spikes_ptr, last0_ptr, last1_ptr,
    numel, x_step, spikes_step, size0, stride0, size1, stride1, size2, stride2, size3, stride3,
    size4, stride4, size5, stride5, start0, start1, n0, n1, n2, n3, n4, n5, n6, n7,
    STEPS: tl.constexpr, CODE: tl.constexpr, SPIKE: tl.constexpr, AFTER: tl.constexpr, KEEP: tl.constexpr,
    WIDE: tl.constexpr, ALIKE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One element of the states a lane, STEPS time steps; see `sparsecomp.reference.neuron` for CODE."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    zero = tl.full((BLOCK,), 0.0, tl.float32)
    states = (state_before(v0_ptr, start0, offset, mask, zero), state_before(v1_ptr, start1, offset, mask, zero))
    fixed = what_stays(
        p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, size0, stride0, size1, stride1, size2, stride2,
        size3, stride3, size4, stride4, size5, stride5, n0, n1, n2, n3, n4, n5, n6, n7, offset, mask, zero, WIDE,
        ALIKE,
    )  # fmt: skip
    # offsets of later steps pass 2^31 where a whole layer does
    x_step = tl.cast(x_step, tl.int64)
    spikes_step = tl.cast(spikes_step, tl.int64)
    for step in tl.static_range(STEPS):
        x = tl.load(x_ptr + step * x_step + offset, mask=mask, other=0.0).to(tl.float32)
        values = (x,) + states + fixed
        for at in tl.static_range(len(CODE)):
            one = do_instruction(CODE[at][0], values[CODE[at][1]], values[CODE[at][2]], values[CODE[at][3]])
            values = values + (one,)
        spikes = values[SPIKE]
        if spikes_ptr.dtype.element_ty == tl.bfloat16:
            spikes = spikes.to(tl.float32)  # the interpreter has no cast from truth values
        tl.store(spikes_ptr + step * spikes_step + offset, spikes.to(spikes_ptr.dtype.element_ty), mask=mask)
        if len(AFTER) == 2:
            states = (values[AFTER[0]], values[AFTER[1]])
        else:
            states = (values[AFTER[0]], zero)
    if KEEP:
        tl.store(last0_ptr + offset, states[0].to(last0_ptr.dtype.element_ty), mask=mask)
        if len(AFTER) == 2:
            tl.store(last1_ptr + offset, states[1].to(last1_ptr.dtype.element_ty), mask=mask)


def _prepare(problem: Neurons, config: Config) -> Launch:
    constants = {**problem.constants, "BLOCK": config["BLOCK"]}
    grid = (triton.cdiv(problem.numel, config["BLOCK"]),)
    numbers = problem.all_numbers
    return Launch(neuron_kernel, grid, numbers, constants, num_warps=config["warps"], enable_fp_fusion=False)


_numel, _steps, _block, _warps = sizes("numel steps BLOCK warps")

NEURON = Template(
    name="neuron",
    op="neuron",
    sources=(neuron_kernel, do_instruction, to_bfloat16, state_before, what_stays, parameter_of),
    space=lambda problem, device: [
        Config(BLOCK=block, warps=warps) for block in (256, 512, 1024) for warps in (2, 4, 8)
        if 4 <= block // (32 * warps) <= 16
    ],
    # as of the kernel `lif`
    cost=Cost(
        bytes=_numel * (5 * _steps + 4),
        seconds=3e-6 + 1e-8 * (_block / (32 * _warps)) ** 2 + 4e-10 * _block,
    ),
    prepare=_prepare,
)
