"""Softmax over stored rows, and attention in three steps by it, beside torch's in float64."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES
from torch import Tensor

from sparsecomp.attention import attend_by_weights, attention_weights
from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR
from sparsecomp.ops import row_softmax

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def pattern_of(rows: int, columns: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A mask, and pointers behind two spare entries, of which some more follow; a row is empty and one is full."""
    mask = torch.rand((rows, columns), generator=torch.Generator().manual_seed(rows)) < 0.2
    mask[rows // 2], mask[rows // 3] = False, True
    pointers = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)) + 2
    return mask.to(device), pointers.int().to(device)


def by_torch(values: Tensor, mask: Tensor) -> Tensor:
    """The softmax of entries within two spare ones and three, by a dense matrix."""
    dense = torch.full((*values.shape[:-1], *mask.shape), -torch.inf, dtype=torch.float64, device=values.device)
    dense = dense.masked_scatter(mask.expand_as(dense), values[..., 2:-3].double())
    found = torch.softmax(dense, -1).nan_to_num(0.0)
    kept = found[..., mask] if values.dim() == 1 else torch.stack([one[mask] for one in found])
    return torch.nn.functional.pad(kept, (2, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("leading", [(), (3,)])
def test_softmax_of_rows(leading, device):
    mask, pointers = pattern_of(13, 40, device)
    random = torch.Generator().manual_seed(0)
    for dtype, tolerance in TOLERANCE.items():
        values = torch.randn((*leading, int(mask.sum()) + 5), generator=random).to(device, dtype)
        values[..., :2], values[..., -3:], values[..., 5] = torch.nan, torch.nan, -torch.inf
        values.requires_grad_()
        found, right = row_softmax(values, pointers), by_torch(values, mask)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)
        weight = torch.linspace(-1, 1, values.numel(), device=device).view_as(values)
        by, wanted = (torch.autograd.grad((one * weight).sum(), values)[0][..., 2:-3] for one in (found, right))
        torch.testing.assert_close(by.double(), wanted.double(), rtol=2 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(13, 40), (3, 700), (70, 5)])
def test_kernels_beside_float64(sizes, dtype, device):
    from sparsecomp.lowering.sparse import row_softmax as lowered

    mask, pointers = pattern_of(*sizes, device)
    values = torch.randn((2, int(mask.sum()) + 5), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    values[:, :2], values[:, -3:], values[:, 5] = torch.nan, torch.nan, -torch.inf
    out = torch.zeros_like(values)
    lowered.write_softmax(values, pointers, out)
    wide = values.double().requires_grad_()
    right = by_torch(wide, mask)
    torch.testing.assert_close(out.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    grad = torch.linspace(-1, 1, values.numel(), device=device).view_as(values).to(dtype)
    by = torch.zeros_like(values)
    lowered.write_softmax_gradient(grad, out, pointers, by)
    (wanted,) = torch.autograd.grad(right, wide, grad.double())
    torch.testing.assert_close(
        by.double()[:, 2:-3], wanted[:, 2:-3], rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
    )
    assert not by[:, :2].any() and not by[:, -3:].any()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_rows_of_the_least_and_the_greatest_numbers(device):
    """As masks that are filled with the least number leave them; each row against the softmax of float64."""
    least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    rows = [[least] * 3, [1.0, 2.0, least], [most, 1.0], [most, most, least], [least, least / 2]]
    pointers = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    values = torch.tensor([one for row in rows for one in row], device=device)
    found = torch.ops.sparsecomp.row_softmax.default.direct_cuda(values, pointers.to(device))
    expected = torch.cat([torch.tensor(row, dtype=torch.float64).softmax(0) for row in rows])
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-6, atol=1e-6)


def test_rows_of_minus_infinity_and_none_at_all():
    found = row_softmax(torch.tensor([-torch.inf, -torch.inf, 1.0]), torch.tensor([0, 2, 3]))
    assert found.tolist() == [0.0, 0.0, 1.0]
    assert row_softmax(torch.zeros(0), torch.zeros(4, dtype=torch.int32)).numel() == 0
    assert row_softmax(torch.zeros(2), torch.zeros(1, dtype=torch.int32)).tolist() == [0.0, 0.0]
    for values, pointers in ((torch.zeros(2, 2, 2), torch.zeros(3).int()), (torch.zeros(2), torch.zeros(3))):
        with pytest.raises(FormatError, match="need"):
            row_softmax(values, pointers)


def test_gradcheck_and_the_registered_operator():
    mask, pointers = pattern_of(4, 6)
    values = torch.randn(2, int(mask.sum()) + 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: row_softmax(x, pointers), values)
    assert torch.autograd.gradgradcheck(lambda x: row_softmax(x, pointers), values)
    torch.library.opcheck(torch.ops.sparsecomp.row_softmax.default, (values, pointers))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_in_three_steps(kv_heads, device):
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(0)) < 0.2
    mask[7] = False
    pairs = CSR.from_dense(mask.float()).to(device)
    shapes = ((2, 4, 20, 16), (2, kv_heads, 30, 16), (2, kv_heads, 30, 24))
    for dtype, tolerance in TOLERANCE.items():
        given = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()
                 for shape in shapes]  # fmt: skip
        weights = attention_weights(given[0], given[1], pairs, scale=0.3)
        out = attend_by_weights(weights, given[2], pairs)
        wide = [one.detach().double().requires_grad_() for one in given]
        q, k, v = wide[0], *(one.repeat_interleave(4 // kv_heads, 1) for one in wide[1:])
        score = (q @ k.mT * 0.3).masked_fill(~mask.to(device), -torch.inf)
        dense = torch.softmax(score, -1).nan_to_num(0.0)
        assert out.dtype is dtype and weights.dtype is torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(weights.double(), dense[..., mask.to(device)], rtol=1e-5, atol=1e-6)
        grad = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
        right = (dense @ v, *torch.autograd.grad((dense @ v * grad).sum(), wide))
        found = (out, *torch.autograd.grad((out * grad).sum(), given))
        for one, other in zip(found, right, strict=True):
            error = torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other)
            assert error <= 2 * tolerance, (dtype, float(error))


def test_what_does_not_fit_is_refused():
    pairs = CSR.from_dense(torch.ones(20, 30))
    q, k = torch.ones(2, 4, 20, 8), torch.ones(2, 2, 30, 8)
    for query, key, why in ((q[:, :, :3], k, "do not go with"), (q.half(), k, "one dtype"), (q[:, :3], k, "divide")):
        with pytest.raises(FormatError, match=why):
            attention_weights(query, key, pairs)
    for weights, value, why in ((torch.ones(2, 4, 5), k, "do not go with"), (torch.ones(2, 3, 600), k, "divide")):
        with pytest.raises(FormatError, match=why):
            attend_by_weights(weights, value, pairs)


@pytest.mark.slow(reason="compiles the kernels for two targets")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.sparse.kernels.row_softmax import row_softmax_gradient_kernel, row_softmax_kernel
        for kernel in (row_softmax_kernel, row_softmax_gradient_kernel):
            types = {{n: "*bf16" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}}
            types["pointers_ptr"] = "*i64"
            built = build(kernel, types, dict(ROWS=8, WIDE=64), {capability}, num_warps=4)
            print("st.global" in built.asm["ptx"])
        """
    )
    assert printed.split() == ["True"] * 2
