"""Attention within packed documents, each beside torch's own attention on it alone."""

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of
from test_mask_scan import alike
from torch import Tensor

from sparsecomp.attention import Documents, packed_attention
from sparsecomp.errors import FormatError, MaskError
from sparsecomp.lowering.attention.document_lists import document_lists
from sparsecomp.ops.attention.packed_blocks import packed_blocks
from sparsecomp.reference.attention.blocks import AttentionBlocks, blocks_of, dense_mask
from sparsecomp.reference.attention.packed import PackedDocuments, tiles_of

Q_LENGTHS, K_LENGTHS = (5, 0, 90, 1, 1, 64, 130, 3), (9, 7, 90, 0, 2, 200, 64, 3)
Window = tuple[int | None, int | None]
WINDOWS: list[Window] = [(None, None), (None, 0), (20, 5), (0, 0)]


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def kept_pairs(window: Window, q_len: int, k_len: int) -> Tensor:
    """Document by document."""
    mask = torch.zeros(1, 1, q_len, k_len, dtype=torch.bool)
    row = column = 0
    for rows, columns in zip(Q_LENGTHS, K_LENGTHS, strict=True):
        distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        kept = torch.ones_like(distance, dtype=torch.bool)
        if window[0] is not None:
            kept &= distance <= window[0]
        if window[1] is not None:
            kept &= distance >= -window[1]
        mask[0, 0, row : row + rows, column : column + columns] = kept
        row, column = row + rows, column + columns
    return mask


def packed(window: Window, block: tuple[int, int], padding: int) -> tuple[PackedDocuments, Tensor]:
    q_len, k_len = sum(Q_LENGTHS) + padding, sum(K_LENGTHS) + 2 * padding
    before, after = (q_len + k_len if side is None else side for side in window)
    return PackedDocuments(q_len, k_len, *block, before, after), kept_pairs(window, q_len, k_len)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block", [(32, 32), (64, 32), (32, 128)])
def test_kernels_find_what_each_document_keeps(block: tuple[int, int], window: Window, device: str) -> None:
    sizes, mask = packed(window, block, 40)
    offsets = (offsets_of(lengths).to(device) for lengths in (Q_LENGTHS, K_LENGTHS))
    found = document_lists(*offsets, sizes)
    alike(AttentionBlocks(*sizes[:4], *found), blocks_of(mask, block))


@pytest.mark.parametrize("window", WINDOWS)
def test_the_cpu_finds_what_each_document_keeps(window: Window) -> None:
    for padding, block in ((0, (32, 32)), (40, (64, 32))):
        sizes, mask = packed(window, block, padding)
        found = packed_blocks(
            offsets_of(Q_LENGTHS), offsets_of(K_LENGTHS), *sizes[:2], block, before=window[0], after=window[1]
        )
        assert torch.equal(dense_mask(found), mask)


@pytest.mark.slow(reason="many random packings")
def test_there_is_room_for_the_tiles_of_any_documents() -> None:
    random = torch.Generator().manual_seed(0)
    for number in range(300):
        count = int(torch.randint(1, 60, (), generator=random))
        most = 2 ** int(torch.randint(1, 9, (), generator=random))
        lengths = [torch.randint(0, most, (count,), generator=random) for _ in range(2)]
        q, k = (F.pad(one.cumsum(0), (1, 0)).int() for one in lengths)
        q_len, k_len = max(int(q[-1]), 1), max(int(k[-1]), 1)
        side = (None, 0, 3, most // 2)[number % 4]
        blocks = packed_blocks(q, k, q_len, k_len, (32, 32), before=side, after=(None, 0)[number % 2])
        far = q_len + k_len
        room = tiles_of(count, PackedDocuments(q_len, k_len, 32, 32, far, far))
        assert int(blocks.partial.sum()) <= room == len(blocks.bits)


def operands(dtype: torch.dtype = torch.float32, kv_heads: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((sum(Q_LENGTHS) + 3, 2, 16), (sum(K_LENGTHS), kv_heads, 16), (sum(K_LENGTHS), kv_heads, 24))
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def each_alone(q: Tensor, k: Tensor, v: Tensor, window: Window) -> Tensor:
    parts, row, column = [], 0, 0
    mask = kept_pairs(window, len(q), len(k))
    for rows, columns in zip(Q_LENGTHS, K_LENGTHS, strict=True):
        one = [x[first : first + n].transpose(0, 1)[None]
               for x, first, n in ((q, row, rows), (k, column, columns), (v, column, columns))]  # fmt: skip
        kept = mask[..., row : row + rows, column : column + columns]
        if columns:
            parts.append(F.scaled_dot_product_attention(*one, kept, enable_gqa=True)[0].transpose(0, 1))
        else:
            parts.append(q.new_zeros(rows, q.shape[1], v.shape[2]))
        row, column = row + rows, column + columns
    return torch.cat([*parts, q.new_zeros(len(q) - row, q.shape[1], v.shape[2])])


@pytest.mark.parametrize("window", WINDOWS)
def test_it_is_torchs_attention_on_each_document(window: Window) -> None:
    q, k, v = (one.double().requires_grad_() for one in operands())
    offsets = offsets_of(Q_LENGTHS), offsets_of(K_LENGTHS)
    found = packed_attention(q, k, v, *offsets, window=window, causal=window == (None, 0))
    right = each_alone(q, k, v, window)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10)
    grads = (torch.autograd.grad(one.square().sum(), (q, k, v)) for one in (found, right))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_one_tensor_of_offsets_stands_for_both_sides() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(Q_LENGTHS), 2, 8, generator=random) for _ in range(3))
    mask = Documents.of_lengths(Q_LENGTHS).to_dense(len(q))
    right = F.scaled_dot_product_attention(*(one.transpose(0, 1)[None] for one in (q, k, v)), mask)
    torch.testing.assert_close(packed_attention(q, k, v, offsets_of(Q_LENGTHS)), right[0].transpose(0, 1))


def test_compiled_once_for_other_documents() -> None:
    q, k, v = operands(kv_heads=2)
    k, v = (F.pad(one, (0, 0, 0, 0, 0, len(q) - len(k))) if len(k) < len(q) else one[: len(q)] for one in (k, v))
    compiled = torch.compile(packed_attention, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (Q_LENGTHS, Q_LENGTHS[::-1], (1, 2, 3, 4, 5, 6, 7, 8)):
            offsets = offsets_of(lengths)
            torch.testing.assert_close(compiled(q, k, v, offsets), packed_attention(q, k, v, offsets))


def test_opcheck_and_nothing() -> None:
    offsets = offsets_of(Q_LENGTHS)
    args = (offsets, offsets_of(K_LENGTHS), 300, 400, 32, 64, 700, 0)
    torch.library.opcheck(torch.ops.sparsecomp.packed_blocks.default, args)
    q = torch.randn(0, 2, 8)
    assert packed_attention(q, q, q, offsets).shape == (0, 2, 8)
    assert not packed_attention(torch.randn(4, 1, 8), *[torch.randn(6, 1, 8)] * 2, torch.zeros(3).int()).any()


@pytest.mark.parametrize(
    ("offsets", "more", "told"),
    [
        (torch.tensor([0, 4]), {}, "int32"), (torch.tensor([0], dtype=torch.int32), {}, "documents"),
        (torch.tensor([0, 4], dtype=torch.int32), {"window": (-1, 0)}, "from 0 on"),
        (torch.tensor([0, 4], dtype=torch.int32), {"block": (48, 64)}, "powers of two"),
    ],
)  # fmt: skip
def test_offsets_that_are_none(offsets: Tensor, more: dict, told: str) -> None:
    q = torch.randn(4, 2, 8)
    with pytest.raises(MaskError, match=told):
        packed_attention(q, q, q, offsets, **more)
    with pytest.raises(FormatError, match="tokens, heads, depth"):
        packed_attention(q[None], q, q, torch.tensor([0, 4], dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_it_is_torchs_attention_on_each_document(self, dtype: torch.dtype, window: Window) -> None:
        given = operands(dtype)
        wide = [one.double().requires_grad_() for one in given]
        right = each_alone(*wide, window)
        given = [one.cuda().requires_grad_() for one in given]
        offsets = [offsets_of(lengths).cuda() for lengths in (Q_LENGTHS, K_LENGTHS)]
        found = packed_attention(*given, *offsets, window=window)
        pairs = [(found, right)]
        pairs += zip(torch.autograd.grad(found.float().square().sum(), given),
                     torch.autograd.grad(right.square().sum(), wide), strict=True)  # fmt: skip
        for one, other in pairs:
            bound = 2e-5 if dtype is torch.float32 else 3e-2
            size = torch.linalg.vector_norm(other) + torch.linalg.vector_norm(right)  # of one key gradients are zero
            assert torch.linalg.vector_norm(one.cpu().double() - other) <= bound * size

    def test_a_captured_call_reads_what_is_there_now(self) -> None:
        q, k, v = (one.cuda() for one in operands(torch.bfloat16))
        offsets = [offsets_of(lengths).cuda() for lengths in (Q_LENGTHS, K_LENGTHS)]
        graph, found = graph_of(lambda: packed_attention(q, k, v, *offsets))
        for one in offsets:
            one.copy_(torch.tensor([0, 10, 20, 30, 100, 101, 102, 200, 250], dtype=torch.int32))
        graph.replay()
        assert torch.equal(found, packed_attention(q, k, v, *offsets))


@pytest.mark.slow(reason="compiles kernels for two targets")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.kernels.document_lists import count_listed_kernel, fill_lists_kernel
        fixed = dict(BLOCK_ROW=64, BLOCK_COLUMN=128, STEPS=7, ALL=512)
        for kernel in (count_listed_kernel, fill_lists_kernel):
            types = {{n: "*i32" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}}
            tile = {{n: value for n, value in fixed.items() if n in kernel.arg_names}}
            print("ld.global" in build(kernel, types, tile, {capability}, whole=()).asm["ptx"])
        """
    )
    assert printed.split() == ["True"] * 2
