"""Launches every kernel at odd sizes, for a checker of memory: `compute-sanitizer python -m tests.launch_all`.

Sizes are primes and one more than powers of two, so that every mask of a load is needed. What is computed is compared
elsewhere; here kernels only have to be launched, and those that were not are named at the end. Names behind the device
are of the steps to take, instead of all: `python -m tests.launch_all cuda attention_once`.
"""

import itertools
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsecomp import ops
from sparsecomp.attention import GlobalTokens, LocalWindow, packed_attention
from sparsecomp.formats import BITMAP, BSR, COO, CSR, NARROW, NM
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.tuning.autotune import Tuner
from sparsecomp.lowering.tuning.template import Operation, Template, all_templates
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.nn import GeoSparseLinear, GeoSparseResidualBlock, SparseEmbedding, SparseLinear
from sparsecomp.ops.sparse.bitmap_linear import bitmap_linear
from sparsecomp.ops.sparse.bitmap_pair import bitmap_pair
from sparsecomp.ops.sparse.dense_copy import dense_copy, keep_dense_copy
from sparsecomp.ops.sparse.dense_weight import dense_to_stored, stored_to_dense
from sparsecomp.ops.sparse.gated_pair import gated_pair
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.ops.sparse.packed_linear import packed_linear, packed_pair
from sparsecomp.ops.sparse.siblings import siblings
from sparsecomp.reference.attention.blocks import blocks_of
from sparsecomp.reference.attention.elements import elements_of_mask
from sparsecomp.reference.digits import SPREAD
from sparsecomp.reference.patterns import stored_by_rows
from sparsecomp.tensor.index_arrays import IndexArrays

CSR_KERNELS = ("", "spmm_csr_rows", "spmm_csr_few", "spmm_csr_merge", "spmm_csr_dense", "spmm_csr_halves")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def main(device: str = "cuda", *wanted: str) -> int:
    """Launch all, or those of the steps that are named; the number of kernels of theirs that were not."""
    torch.manual_seed(0)
    launched: set[str] = set()
    problems: dict[tuple[Operation[Any], Any], None] = {}
    call, choose = Launch.__call__, Tuner.choose

    def noted(self: Launch, *tensors: Tensor | None) -> None:
        launched.add(self.kernel.fn.__name__ if hasattr(self.kernel, "fn") else self.kernel.__name__)
        call(self, *tensors)

    def chosen(self: Tuner, operation: Operation[Any], problem: Any, *rest: Any) -> Any:
        problems[operation, problem] = None
        return choose(self, operation, problem, *rest)

    Launch.__call__, Tuner.choose = noted, chosen  # pyright: ignore[reportAttributeAccessIssue]
    try:
        steps = (
            sparse_layers, local_layers, attention, written_out, spikes, neurons, masks, sparse_tensor_cores,
            by_a_bitmap,
        )  # fmt: skip
        taken = [step for step in (*steps, attention_once) if step.__name__ in wanted] if wanted else steps
        for step in (*taken, partial(the_rest, launched, problems)):
            step(device)
            if device == "cuda":
                torch.cuda.synchronize()
            print(getattr(step, "__name__", "the rest"), "done", flush=True)
    finally:
        Launch.__call__, Tuner.choose = call, choose  # pyright: ignore[reportAttributeAccessIssue]
    asked = {operation.name for operation, _ in problems}
    missing = sorted(
        name(template) for template in all_templates()
        if template.sources and name(template) not in launched and (not wanted or template.op in asked)
    )  # fmt: skip
    print(f"{len(launched)} kernels launched; first ones of a template that were not: {', '.join(missing) or 'none'}")
    return len(missing)


def name(template: Template[Any]) -> str:
    """Of the template's first kernel; of the template, if it calls a library."""
    return template.sources[0].fn.__name__ if template.sources else template.name


def the_rest(launched: set[str], problems: dict[tuple[Operation[Any], Any], None], device: str) -> None:
    """Kernels that nobody chose, on the first of the problems that they can do, and held against the reference."""
    for operation, problem in list(problems):
        for candidate in operation.candidates(problem, device_of(torch.device(device))):
            if name(candidate.template) not in launched and operation.reference is not None:
                wrong = fault(operation, problem, torch.device(device), candidate)
                assert wrong is None, f"{candidate.name} on {problem}: {wrong}"


def sparse_layers(device: str) -> None:
    """Products by every format and kernel, their gradients, and looked-up rows."""
    for dtype, rows in itertools.product(DTYPES, (1, 65)):
        weight = torch.randn(37, 53, device=device, dtype=dtype) * (torch.rand(37, 53, device=device) < 0.3)
        weight[5] = 0
        matrices = [CSR.from_dense(weight), COO.from_dense(weight), BSR.from_dense(weight, block=(16, 16))]
        matrices.append(NM.from_dense(*_two_of_four(torch.randn(37, 53, device=device, dtype=dtype)), n=2, m=4))
        x = torch.randn(rows, 53, device=device, dtype=dtype, requires_grad=True)
        layers = [SparseLinear(kind.from_dense(weight)) for kind in (NARROW, BITMAP)]
        for taken in (x, x[:1], x[:5]):
            for layer in layers:
                layer(taken).sum().backward()
            for kind in (NARROW, CSR):
                values, pattern = IndexArrays.of(kind.from_dense(weight))
                pair = values, pattern.arrays, taken[0, :37].contiguous()
                gated_pair(taken, *pair, *pair, pattern.layout.written(), "silu")
            values, pattern = IndexArrays.of(NARROW.from_dense(weight))
            for count in (2, 3):
                several = [values] * count, [*pattern.arrays] * count, [pattern.layout.written()] * count
                siblings(taken, *several, [], [taken[0, :37].contiguous()] * count, 0, 0, "silu")
        for matrix in matrices:
            layer = SparseLinear(matrix, torch.randn(37, device=device, dtype=dtype)).to(device)
            values, pattern = IndexArrays.of(layer.weight.matrix)
            for kernel in CSR_KERNELS if isinstance(matrix, CSR) else ("",):
                residual = torch.randn(rows, 37, device=device, dtype=dtype)
                out = sparse_linear(
                    x, values.requires_grad_(), pattern.arrays, pattern.layout.written(), bias=layer.bias,
                    residual=residual, activation="gelu", kernel=kernel,
                )  # fmt: skip
                out.sum().backward()
            layer(x).sum().backward()
            # the columns the other way round: a kept transpose is made anew
            layer.indices.data.copy_((3 if isinstance(matrix, NM) else int(layer.indices.max())) - layer.indices)
            layer(x).sum().backward()
    table = SparseEmbedding(CSR.from_dense(weight.float())).to(device)
    table(torch.randint(37, (7,), device=device)).sum().backward()
    large = torch.randn(130, 257, device=device) * (torch.rand(130, 257, device=device) < 0.5)
    layer = SparseLinear(CSR.from_dense(large)).to(device)
    layer(torch.randn(129, 257, device=device, requires_grad=True)).sum().backward()


def local_layers(device: str) -> None:
    """Layers of fixed fan-in, residual blocks of two, and their gradients."""
    for dtype, rows, (norm, activation) in itertools.product(
        DTYPES, (1, 65), (("rms", "phase_psann"), ("layer", "tanh"), ("none", "gelu"))
    ):
        index = torch.randint(131, (131, 7))
        x = torch.randn(rows, 131, device=device, dtype=dtype, requires_grad=True)
        block = GeoSparseResidualBlock(131, index, norm=norm, activation_type=activation, drop_path=0.5)
        for layer in (GeoSparseLinear(131, 37, index[:37]), block):
            layer.to(device, dtype)(x).sum().backward()
    layer = GeoSparseLinear(131, 37, index[:37]).to(device)
    layer.in_index_per_out.data.copy_(index[37:74])  # the lists of its transpose are made anew
    layer(torch.randn(65, 131, device=device, requires_grad=True)).sum().backward()


def attention_once(device: str) -> None:
    """The kernels of attention over blocks in one configuration each, for a checker that takes long for each."""
    mask = torch.rand(1, 1, 129, 203, device=device) < 0.4
    mask[..., :64, :64], mask[..., 64:128, 64:128] = True, False
    shapes = ((1, 2, 129, 17), (1, 1, 203, 17), (1, 1, 203, 33))
    operands = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    ops.block_attention(*operands, ops.scanned_blocks(mask, 129, 203))[0].sum().backward()
    of_heads = operands[0], *(one.repeat_interleave(2, 1) for one in operands[1:])
    ops.spike_attention(*of_heads, ops.scanned_blocks(mask, 129, 203)).sum().backward()
    ops.scanned_blocks(torch.where(mask, 0.0, -torch.inf), 129, 203)
    caches = [torch.randn(1, 1, 200, n, device=device, dtype=torch.bfloat16) for n in (17, 33)]
    lengths = torch.tensor([200], dtype=torch.int32, device=device)
    ops.decode_attention(operands[0].detach()[:, :, :3], *caches, lengths, window=40, sinks=2)
    offsets = torch.tensor([0, 5, 5, 99, 128], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(129, 2, 17, device=device, dtype=torch.bfloat16) for _ in range(3))
    packed_attention(q, k, v, offsets, causal=True)


def attention(device: str) -> None:
    """Attention over blocks of all kinds, with gradients, of lengths and depths that fill no tile."""
    mask = torch.rand(1, 4, 129, 203, device=device) < 0.4
    mask[..., :64, :64], mask[..., 64:128, 64:128] = True, False
    for dtype, depth in itertools.product(DTYPES, (17, 64)):
        shapes = ((2, 4, 129, depth), (2, 2, 203, depth), (2, 2, 203, 33))
        operands = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        out, logsumexp = ops.block_attention(*operands, blocks_of(mask, (64, 32)))
        (out.sum() + logsumexp.sum()).backward()
        out, logsumexp = ops.element_attention(*operands, elements_of_mask(mask))
        (out.sum() + logsumexp.sum()).backward()
        caches = [torch.randn(2, 2, 200, n, device=device, dtype=dtype) for n in (depth, 33)]
        lengths = torch.tensor([200, 3], dtype=torch.int32, device=device)
        ops.decode_attention(operands[0].detach()[:, :, :3], *caches, lengths, window=40, sinks=2)
        ops.masked_decode_attention(operands[0].detach()[:, :, :3], *caches, mask[:, :, :3, 3:])
        ops.block_attention(*operands, ops.scanned_blocks(mask, 129, 203), dropout=0.3)[0].sum().backward()
        added_attention(operands, mask)
        of_heads = operands[0], *(one.repeat_interleave(2, 1) for one in operands[1:])
        for counts in (False, True):
            ops.spike_attention(*of_heads, blocks_of(mask, (64, 32)), counts=counts).sum().backward()
    offsets = torch.tensor([0, 5, 5, 99, 128], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(129, 2, 17, device=device, requires_grad=True) for _ in range(3))
    packed_attention(q, k, v, offsets, causal=True).sum().backward()
    biases_of_a_table(device)
    long_attention(device)


def added_attention(operands: list[Tensor], mask: Tensor) -> None:
    """With numbers that are added to scores."""
    added = torch.where(mask, 0.5, -torch.inf)
    lists = list(ops.scanned_blocks(added, 129, 203)[4:])
    torch.ops.sparsecomp.block_attention.default(*operands, lists, 0.1, 0.0, None, added)[0].sum().backward()


def biases_of_a_table(device: str) -> None:
    """A table that is read at many places, with heads innermost and outermost."""
    index = torch.randint(-37, 37, (129, 203), device=device)
    for dtype in DTYPES:
        table = torch.randn(37, 3, device=device, dtype=dtype, requires_grad=True)
        for rows in (ops.table_rows(table, index), ops.table_rows(table, index, 5).permute(2, 0, 1)):
            rows.backward(torch.randn(rows.shape, device=device, dtype=dtype))


def long_attention(device: str) -> None:
    """Lists that are walked over in parts."""
    if device == "cuda":
        q, k, v = (torch.randn(1, 1, 8203, 16, device=device, requires_grad=True) for _ in range(3))
        blocks = (GlobalTokens((3, 8200)) | LocalWindow(40, 40)).to_blocks(8203, device=device)
        ops.block_attention(q, k, v, blocks, in_parts=(True, True))[0].sum().backward()


def sparse_tensor_cores(device: str) -> None:
    """A product large enough for them, whose weight's copy is guarded by a fingerprint, and layers of few rows."""
    if device == "cuda":
        from sparsecomp.lowering.sparse.packed_linear import PackedPositions, order_for

        for rows, dtype in ((1, torch.float16), (7, torch.bfloat16)):
            small = NM.from_dense(*_two_of_four(torch.randn(37, 404, device=device, dtype=dtype)), n=2, m=4)
            weight = small.values, small.indices, PackedPositions(order_for(rows))(small.indices)
            x = torch.randn(rows, 404, device=device, dtype=dtype)
            packed_linear(x, *weight, x[0, :37].clone(), x[:, :37].clone())
            packed_pair(x, *weight, None, *weight, None, "silu")
            values, indices, positions = weight
            layout, bias = stored_by_rows(small)[2].written(), x[0, :37].clone()
            for count in (2, 3):
                several = [[one] * count for one in (values, indices, layout, positions, bias)]
                siblings(x, *several, 0, 0, "silu")
        halved = NM.from_dense(*_two_of_four(torch.randn(4096, 4096, device=device, dtype=torch.float16)), n=2, m=4)
        SparseLinear(halved)(torch.randn(4096, 4096, device=device, dtype=torch.float16))


def by_a_bitmap(device: str) -> None:
    """Layers of few rows by a bitmap."""
    if device == "cuda":
        from sparsecomp.lowering.sparse.bitmap_linear import BitmapChunks, longest_chunk

        for rows, dtype in ((1, torch.float16), (11, torch.bfloat16)):
            dense = torch.randn(37, 408, device=device, dtype=dtype) * (torch.rand(37, 408, device=device) < 0.3)
            values, arrays, layout = stored_by_rows(CSR.from_dense(dense))
            grain, longest = 1 + (rows > 1), longest_chunk(arrays, layout, 1 + (rows > 1))
            copy = list(BitmapChunks(layout.written(), grain)(values, *arrays)), grain, longest
            x = torch.randn(rows, 408, device=device, dtype=dtype)
            weight, bias = (values, list(arrays), layout.written(), copy[0]), x[0, :37].clone()
            bitmap_linear(x, *weight, *copy[1:], bias, x[:, :37].clone())
            bitmap_pair(x, *weight, bias, *weight, bias, *copy[1:], "silu")
            for count in (2, 3):
                patterns, copies = weight[1] * count, copy[0] * count
                siblings(x, [values] * count, patterns, [weight[2]] * count, copies, [bias] * count, *copy[1:])
            SparseLinear(BITMAP.from_dense(dense), requires_grad=False)(x)


def _two_of_four(weight: Tensor) -> tuple[Tensor]:
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 4)).view(weight.shape[0], -1, 4)
    kept = torch.zeros_like(groups).scatter(-1, groups.abs().topk(2).indices, 1)
    return ((groups * kept).flatten(1)[:, : weight.shape[1]].contiguous(),)


def written_out(device: str) -> None:
    """A weight written out dense, and its gradient read back."""
    for dtype in DTYPES:
        weight = torch.randn(33, 1030, device=device, dtype=dtype) * (torch.rand(33, 1030, device=device) < 0.1)
        for kind in (BITMAP, CSR):
            values, pattern = IndexArrays.of(kind.from_dense(weight))
            layout = pattern.layout.written()
            dense_to_stored(stored_to_dense(values, pattern.arrays, layout), pattern.arrays, layout)
        keep_dense_copy(values, pattern.layout)
        dense_copy(values, pattern.arrays, layout)


def spikes(device: str) -> None:
    """Layers on spikes by every implementation, with gradients, weights of any range and factors."""
    for dtype, implementation, groups in itertools.product(DTYPES, ("binary", "direct", "event", "skip"), (1, 2)):
        x = (torch.rand(3, 18, 13, 11, device=device) < 0.1).to(dtype).requires_grad_()
        weight = torch.randn(34, 18 // groups, 3, 3, device=device, dtype=dtype, requires_grad=True)
        bias, how = torch.randn(34, device=device, dtype=dtype), ([2, 1], [1, 1], [1, 2], groups)
        for factor in (None, torch.tensor([float("inf")], device=device, dtype=dtype)):
            more: dict[str, Any] = {"factor": factor, "binary": factor is not None}
            ops.spike_conv(x, weight, bias, *how, 3, implementation, **more).sum().backward()
        with torch.no_grad():
            weight[3] *= 1e-4
            weight[3, 0] = 3e4
            ops.spike_conv(x, weight, bias, *how, 3, implementation)
            ops.spike_linear(x.flatten(1), torch.randn(19, x[0].numel(), device=device, dtype=dtype), None, 2, "binary")
    whole = (torch.rand(3, 64, 13, 11, device=device) < 0.1).float()  # channels as tensor cores want them
    ops.spike_conv(whole, torch.randn(33, 64, 3, 3, device=device), None, [1, 1], [1, 1], [1, 1], 1, 3, "binary")
    for dtype in DTYPES:  # depthwise
        x, weight = whole.to(dtype), torch.randn(64, 1, 3, 3, device=device, dtype=dtype)
        ops.spike_conv(x, weight, None, [1, 1], [1, 1], [1, 1], 64, 3, "direct")
    for dtype, groups in itertools.product(DTYPES, (1, 2)):
        x = (torch.rand(3, 18, 9, 7, device=device) < 0.1).to(dtype).requires_grad_()
        weight = torch.randn(18, 34 // groups, 3, 4, device=device, dtype=dtype, requires_grad=True)
        weight.data[:, 1] *= 1e4
        ops.spike_conv_transpose(x, weight, None, [2, 3], [1, 0], [1, 0], groups, [1, 2], 3).sum().backward()
    heads = (torch.rand(3, 49, 4, 24, device=device) < 0.2).float().transpose(1, 2)
    ops.spike_matmul(heads, heads.mT)


def neurons(device: str) -> None:
    """Neurons with and without batch-norm, reset and a rate, and one that is described."""
    statistics = [torch.rand(5, device=device) + 0.5 for _ in range(4)]
    x = torch.randn(4, 3, 5, 7, 11, device=device)
    for charge, reset, norm in itertools.product(("if", "lif", "plif"), (0.0, None), (False, True)):
        rate = torch.tensor([0.5], device=device) if charge == "plif" else None
        parts = statistics if norm else [None] * 4
        ops.lif(x, None, 0.0, *parts, 1e-5, charge, 2.0, rate, True, 1.0, reset)
    for steps, channels, keep in ((1, 64, True), (4, 64, False), (3, 17, True), (8, 40, True)):
        counts = (torch.rand(2 * steps, channels, 13, 11, device=device) < 0.2).to(torch.int8)
        weight = torch.randn(33, channels, 3, 3, device=device)
        how = (None, [1, 1], [1, 1], [1, 1], 1, 3, 1.0, SPREAD, True, steps, None, 0.0, None, None, None, None)
        spikes, *_ = ops.conv_lif(counts, weight, *how, 1e-5, "lif", 2.0, None, True, 1.0, 0.0, keep)
        ops.conv_lif(counts, weight, *how, 1e-5, "lif", 2.0, None, True, 1.0, 0.0, keep, spikes)
        ops.conv_lif(counts, weight, *how, 1e-5, "lif", 2.0, None, True, 1.0, 0.0, keep, None, "add", spikes, True)
        described = [None], [0.0], [torch.rand(33, device=device)], [1.0]
        step = "t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; spike t2; v0 t1"
        for dtype in DTYPES:
            given = counts, weight.to(dtype), *how[:10], *how[12:], 1e-5, *described, step, keep
            ops.conv_neuron(*given)
            ops.conv_neuron(*given, spikes, "iand", spikes.to(dtype), True, dtype)
    step = "t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; t3 = float t2; t4 = sub t1 t3; spike t2; v0 t4; v1 t3"
    for keep in (False, True):
        decay = torch.rand(5, 1, 1, device=device)
        for dtype in DTYPES:
            state, given = torch.rand_like(x[0]).to(dtype), decay.to(dtype)
            ops.neuron(x, [state, None], [0.0, 0.5], [given], [1.0], step, keep, dtype, dtype)
    step = "t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; t3 = fire t2 t1; spike t3; v0 t1; b0 = exp u; pull b0"
    for dtype in DTYPES:
        given = x.to(dtype).requires_grad_(), torch.rand_like(x[0]).requires_grad_(), decay.clone().requires_grad_()
        ops.trained_neuron(given[0], [given[1]], [0.0], [given[2]], [1.0], step)[0].sum().backward()


def masks(device: str) -> None:
    """Effective weights, their gradients, selective steps and selections."""
    for dtype in DTYPES:
        weight = torch.randn(67, 129, device=device, dtype=dtype, requires_grad=True)
        mask = torch.rand(67, 129, device=device) < 0.4
        count = int((~mask).sum())
        theta = torch.randn(count, device=device, dtype=dtype, requires_grad=True)
        ops.effective_weight(weight, theta, mask).sum().backward()
        pruned = (~mask).flatten().nonzero().flatten()
        averages = [torch.zeros(count, device=device) for _ in range(3)]
        for selected in (None, count // 10):
            ops.selective_step(
                weight.detach(), torch.randn_like(weight), pruned, *averages, torch.ones((), device=device).long(),
                lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, tau=0.5, delta=1e-8, warm_up=0, count=selected,
            )  # fmt: skip
    ops.select_largest(torch.randn(100_003, device=device), 777)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
