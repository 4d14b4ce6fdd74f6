"""Sparse layers, operators and the rule on a real GPU: every format and dtype, eager and compiled, in CUDA graphs.

The same bodies run on a CPU, where a graph's replay is a second call.
"""

import io
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import DEVICES, graph_of
from matrices import FOLDER, REAL, of_every_format, of_every_layout
from torch import Tensor, nn

import sparsecomp
from bench.sparse.matrices import read
from sparsecomp import formats
from sparsecomp.formats import BITMAP, BSR, COO, CSR, NARROW, NM
from sparsecomp.nn import SparseEmbedding, SparseLinear
from sparsecomp.ops import sddmm, spmm
from sparsecomp.tensor.index_arrays import IndexArrays

pytestmark = pytest.mark.quick_cases(1)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCE = {F64: 1e-13, F32: 2e-6, F16: 1e-3, BF16: 8e-3}
BLOCK = {"block": (16, 16), "sparsity": 0.5}
LAYOUTS = of_every_format({
    "COO": {"sparsity": 0.8}, "CSR": {"sparsity": 0.8}, "CSC": {"sparsity": 0.8}, "BSR": BLOCK, "BCSC": BLOCK,
    "NM": {"n": 2, "m": 4}, "NARROW": {"sparsity": 0.8}, "BITMAP": {"sparsity": 0.8},
})  # fmt: skip
GPU = DEVICES[1]


@pytest.fixture(autouse=True)
def exact_float32():
    """Float32 stays float32."""
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def layer_of(format: str, device: str, dtype: torch.dtype, rows: int = 48, cols: int = 64) -> SparseLinear:
    """A sparse layer, whose pattern has an empty row where the format lets it."""
    linear = nn.Linear(cols, rows)
    with torch.no_grad():
        linear.weight[:16] *= 1e-3
    return SparseLinear.from_linear(linear, getattr(formats, format), **LAYOUTS[format]).to(device, dtype)


def dense_of(layer: SparseLinear, values: Tensor | None = None) -> Tensor:
    """The layer's weight, or other values at its places, written out."""
    weight = layer.weight.detach()
    return (weight if values is None else weight.with_values(values.detach())).to_dense()


def mask_of(layer: SparseLinear) -> Tensor:
    return dense_of(layer, torch.ones_like(layer.values))


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, by Frobenius norm; `wanted` is float64."""
    return float((found.detach().cpu().double() - wanted).norm() / wanted.norm())


def in_float64(layer: SparseLinear, x: Tensor) -> list[Tensor]:
    """The result of `forward_of(layer)`, and the gradients by weight (where stored), bias and x of its squares' sum."""
    weight, bias, x = (
        tensor.detach().cpu().double().requires_grad_() for tensor in (dense_of(layer), layer.bias, x)
    )
    out = F.relu(F.linear(x, weight, bias) + x[..., : weight.shape[0]])
    grads = torch.autograd.grad(out.square().sum(), (weight, bias, x))
    return [out.detach(), grads[0] * mask_of(layer).cpu(), *grads[1:]]


def forward_of(layer: SparseLinear) -> Callable[[Tensor], Tensor]:
    return lambda x: F.relu(layer(x) + x[..., : layer.out_features])


def step_of(forward: Callable[[Tensor], Tensor], layer: SparseLinear, x: Tensor) -> list[Tensor]:
    out = forward(x)
    by_values, *rest = torch.autograd.grad(out.square().sum(), (layer.values, layer.bias, x))
    return [out.detach(), by_values, *rest]


def spread(layer: SparseLinear, found: list[Tensor]) -> list[Tensor]:
    """What `step_of` gave, with the gradient by the values at their places."""
    return [found[0], dense_of(layer, found[1]), *found[2:]]


def cases() -> list[object]:
    """On a GPU everything; on a CPU every format and dtype eager, and one compiled."""
    found = []
    for format in LAYOUTS:
        for dtype in (F32, F16, BF16, F64):
            for compiled in (False, True):
                name = f"{format}-{str(dtype)[6:]}-{'compiled' if compiled else 'eager'}"
                if not compiled or (format, dtype) == ("CSR", F16):
                    found.append(pytest.param("cpu", format, dtype, compiled, id=f"cpu-{name}"))
                found.append(pytest.param("cuda", format, dtype, compiled, id=f"cuda-{name}", marks=GPU.marks))
    return found


@pytest.mark.parametrize(("device", "format", "dtype", "compiled"), cases())
def test_a_layer_infers_and_trains(device, format, dtype, compiled):
    layer = layer_of(format, device, dtype)
    forward = forward_of(layer)
    call = torch.compile(forward, backend="sparsecomp", fullgraph=True) if compiled else forward
    x = torch.randn(2, 5, 64).to(device, dtype).requires_grad_()
    wanted = in_float64(layer, x)
    with torch.no_grad():
        out = call(x)
    assert out.dtype is dtype and out.device.type == device and error(out, wanted[0]) <= 2 * TOLERANCE[dtype]
    found = step_of(call, layer, x)
    for one, right in zip(spread(layer, found), wanted, strict=True):
        assert one.dtype is dtype and error(one, right) <= 4 * TOLERANCE[dtype]
    if compiled:
        sites = [site for site in sparsecomp.last_report().sites if site.rule == "sparse_linear"]
        assert sites and all(site.rewritten for site in sites)


@contextmanager
def no_host_sync(device: str):
    """Within, whatever waits for the GPU raises."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LAYOUTS)
def test_a_step_waits_for_nothing_and_equals_that_of_a_masked_dense_weight(format, device):
    layer = layer_of(format, device, F32)
    dense = nn.Linear(64, 48).to(device)
    with torch.no_grad():
        dense.weight.copy_(dense_of(layer))
        dense.bias.copy_(layer.bias)
    stored = mask_of(layer)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (layer, dense)]
    xs = torch.randn(4, 5, 64).to(device)
    for step, x in enumerate(xs):
        if step == 0:  # the arrays of the transpose, kernels, the optimizer's state
            layer(x).square().mean().backward()
            optimizers[0].step()
        else:
            with no_host_sync(device):
                optimizers[0].zero_grad()
                layer(x).square().mean().backward()
                optimizers[0].step()
        optimizers[1].zero_grad()
        dense(x).square().mean().backward()
        dense.weight.grad.mul_(stored)
        optimizers[1].step()
    torch.testing.assert_close(dense_of(layer), dense.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.bias, dense.bias, rtol=1e-4, atol=1e-5)


def recorded(call: Callable[[], list[Tensor]], device: str) -> tuple[Callable[[], None], list[Tensor]]:
    """What replays a call, and the tensors in which it then leaves its results."""
    if device == "cpu":
        results = call()

        def again() -> None:
            for old, new in zip(results, call(), strict=True):
                old.copy_(new)

        return again, results
    graph, results = graph_of(call)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay, results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("format", LAYOUTS)
def test_a_graph_of_a_training_step_replays_on_new_values(format, dtype, device):
    layer = layer_of(format, device, dtype)
    x = torch.randn(2, 5, 64).to(device, dtype).requires_grad_()
    replay, results = recorded(lambda: step_of(forward_of(layer), layer, x), device)
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(2, 5, 64))
            layer.values.mul_(-1.5)
            layer.bias.add_(0.25)
        replay()
        for found, wanted in zip(spread(layer, results), in_float64(layer, x), strict=True):
            assert error(found, wanted) <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("real", [param for param in REAL if max(param.values[0].shape) <= 2048])
def test_compiled_layers_of_pruned_networks_replay_on_new_inputs(real, dtype, frozen, device):
    """By hand, after the warm-up that a capture needs, at the widths that Gale et al. (arXiv:2006.10901) take."""
    matrix = read(FOLDER / real.file).to(CSR)
    weight = matrix.with_values(torch.randn(matrix.values.shape) / matrix.shape[1] ** 0.5)
    layer = SparseLinear(weight, torch.randn(matrix.shape[0])).to(device, dtype)
    model = torch.compile(nn.Sequential(layer, nn.ReLU()), backend="sparsecomp", options={"frozen": frozen})
    for rows in (256, 2048) if device == "cuda" else (16,):
        x = torch.randn(rows, matrix.shape[1]).to(device, dtype)
        with torch.no_grad():
            model(x)
            replay, (out,) = recorded(lambda x=x: [model(x)], device)
            x.copy_(torch.randn(x.shape))
            replay()
        wanted = F.relu(x.cpu().double() @ dense_of(layer).cpu().double().mT + layer.bias.detach().cpu().double())
        assert error(out, wanted) <= 2 * TOLERANCE[dtype]


def operands(kind: str, dtype: torch.dtype, device: str):
    """Dense matrix (32, 48) in float64, values, pattern with the transpose's arrays, and layout."""
    dense = torch.randn(32, 48) * (torch.rand(32, 48) < 0.3)
    dense[3] = 0
    if kind == "bsr":
        matrix = BSR.from_dense(dense, block=(16, 16))
    elif kind == "nm":
        places = torch.rand(32, 12, 4).topk(2).indices
        dense = torch.zeros(32, 12, 4).scatter(-1, places, torch.randn(32, 12, 2)).flatten(1)
        matrix = NM.from_dense(dense, n=2, m=4)
    else:
        matrix = {"csr": CSR, "narrow": NARROW, "bitmap": BITMAP}[kind].from_dense(dense)
    values, pattern = IndexArrays.of(matrix.with_values(matrix.values.to(dtype)).to_device(device))
    pattern.keep_transposed()
    return dense.to(dtype).double(), values, list(pattern.operands()), pattern.layout


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("kind", of_every_layout(dict.fromkeys(("csr", "bsr", "nm", "narrow", "bitmap"))))
def test_graphs_of_the_operators_replay_on_new_values(kind, dtype, device):
    dense, values, pattern, layout = operands(kind, dtype, device)
    a, b, right, residual = (
        torch.randn(size, 16).to(device, dtype) for size in (32, 48, 48, 32)
    )  # fmt: skip
    bias = torch.randn(32).to(device, dtype)

    def call() -> list[Tensor]:
        sampled = sddmm(a, b, pattern, layout, scale=0.5)
        if dtype is F64 and kind != "bsr" and device == "cuda":
            return [sampled]  # torch's own float64 product reads from the device
        how = {"bias": bias, "bias_axis": "row", "residual": residual, "activation": "gelu"}
        return [sampled, spmm(values, pattern, right, layout, **how)]

    replay, results = recorded(call, device)
    for tensor in (a, b, right, residual, bias, values):
        tensor.copy_(torch.randn(tensor.shape))
    replay()
    own = tuple(array.cpu() for array in pattern[: layout.own])
    matrix, sampled = (
        IndexArrays(kind.upper(), layout, own).matrix(tensor.detach().cpu().double(), False).to_dense()
        for tensor in (values, results[0])
    )
    stored = IndexArrays(kind.upper(), layout, own).matrix(torch.ones(values.shape, dtype=F64), False).to_dense()
    wide = [tensor.cpu().double() for tensor in (a, b, right, residual, bias)]
    assert error(sampled, 0.5 * (wide[0] @ wide[1].mT) * stored) <= TOLERANCE[dtype]
    if len(results) == 2:
        wanted = F.gelu(matrix @ wide[2] + wide[4][:, None] + wide[3])
        assert error(results[1], wanted) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_rule_chooses_by_the_estimate_and_the_result_is_the_same(mode, frozen, device):
    """Few weights and a narrow batch are multiplied sparse; half of them in float16, by a wide batch, dense."""
    size, wide = (8192, 4096) if device == "cuda" else (128, 64)  # so large that no card's host counts
    for sparsity, rows, dtype, chosen in ((0.99, 16, F32, "csr"), (0.5, wide, F16, "dense")):
        torch._dynamo.reset()
        linear = nn.Linear(size, size).to(device)
        layer = SparseLinear.from_linear(linear, sparsity=sparsity).to(dtype).requires_grad_(False)
        x = torch.randn(rows, size).to(device, dtype)
        options = {"mode": mode, "frozen": frozen}
        compiled = torch.compile(nn.Sequential(layer, nn.ReLU()), backend="sparsecomp", options=options)
        with torch.no_grad():
            out = [compiled(x).clone() for _ in range(3)][-1]
        (site,) = (site for site in sparsecomp.last_report().sites if site.rule == "sparse_linear")
        named = chosen if chosen == "csr" else "dense copy" if frozen else "compared copy"
        # what a CPU chooses for so small a layer, the tests of the rule say
        assert site.rewritten and (device == "cpu" or site.implementation == named), site
        wanted = F.relu(x.double() @ dense_of(layer).double().mT + layer.bias.double()).cpu()
        assert error(out, wanted) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_autocast_gives_torchs_dtypes(dtype, device):
    layer = layer_of("CSR", device, F32)
    dense, bias, x = layer.weight.detach().to_dense(), layer.bias.detach(), torch.randn(5, 64).to(device)
    products: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda w, b, x: F.linear(x, w, b), lambda w, b, x: x @ w.t(), lambda w, b, x: torch.mm(w, x.t()),
        lambda w, b, x: torch.mv(w, x[0]), lambda w, b, x: torch.addmm(b, x, w.t()), lambda w, b, x: w @ x[0],
    ]  # fmt: skip
    for product in products:
        exact = product(dense.double(), bias.double(), x.double()).cpu()
        with torch.autocast(device, dtype):
            found, torchs = product(layer.weight, bias, x), product(dense, bias, x)
        assert found.dtype is torchs.dtype and error(found, exact) <= 4 * TOLERANCE[dtype]
    compiled = torch.compile(layer, backend="sparsecomp", fullgraph=True)
    with torch.autocast(device, dtype), torch.no_grad():
        out = compiled(x)
    assert out.dtype is dtype
    wanted = F.linear(x.double(), dense.double(), bias.double()).cpu()
    assert error(out, wanted) <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LAYOUTS)
def test_weights_move_and_load(format, device):
    layer = layer_of(format, "cpu", F32)
    dense = layer.weight.detach().to_dense()
    buffer = io.BytesIO()
    torch.save(layer.to(device).state_dict(), buffer)
    for target in ("cpu", device):
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True, map_location=target)
        loaded = layer_of(format, target, F32)
        loaded.load_state_dict(state)
        assert loaded.values.device.type == target and torch.equal(dense_of(loaded).cpu(), dense)
    assert torch.equal(layer.weight.detach().cpu().to_dense(), dense)
    assert torch.equal(layer.weight.detach().t().to_dense().cpu(), dense.mT)
    with torch.no_grad():
        layer.weight.mul_(2).add_(layer.weight)  # a view of the values
    torch.testing.assert_close(dense_of(layer).cpu(), 4 * dense)


@pytest.mark.parametrize("device", DEVICES)
def test_an_embedding_and_a_sorted_conversion_wait_for_nothing(device):
    table = SparseEmbedding.from_embedding(nn.Embedding(40, 16), sparsity=0.7).to(device)
    index = torch.randint(40, (3, 7)).to(device)
    coo = COO.from_dense((torch.randn(40, 16) * (torch.rand(40, 16) < 0.2)).to(device))
    table(index).sum().backward()
    with no_host_sync(device):
        out = table(index)
        csr = coo.to(CSR)
    assert torch.equal(out.detach(), table.weight.detach().to_dense()[index])
    dense = coo.to_dense()
    assert torch.equal(csr.to_dense(), dense)
    assert csr.crow.tolist() == [0, *(dense != 0).sum(1).cumsum(0).tolist()]
