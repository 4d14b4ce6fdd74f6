"""Kept lists of a layer of fixed fan-in follow every write to its index, seen by a version counter or not.

What is expected comes from the dense weight that the written index describes, in float64.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of
from margins import Margins
from torch import Tensor, nn
from write_matrix import WRITES

import sparsecomp
from sparsecomp.errors import FormatError
from sparsecomp.nn import GeoSparseLinear, GeoSparseResidualBlock
from sparsecomp.ops.local.residual_block import residual_block
from sparsecomp.reference.local.transposed import kept_lists

pytestmark = pytest.mark.quick_cases(1)

N, OUT, K = 23, 31, 4


def index_of(seed: int, shape: tuple[int, int] = (OUT, K), inputs: int = N) -> Tensor:
    """Inputs repeat, within an output too; some are read by nobody, and one by many."""
    index = torch.randint(inputs, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    index[::3, 0] = seed % inputs
    return index


def layer_of(seed: int = 0, n: int = N, device: str = "cpu") -> GeoSparseLinear:
    return GeoSparseLinear(n, OUT, index_of(seed, inputs=n)).to(device)


def exactly(x: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = weight.detach().double()
    dense = torch.zeros(index.shape[0], x.shape[-1], dtype=torch.float64, device=x.device)
    dense = dense.scatter_add(1, index.to(x.device).long(), weight)
    return F.linear(x.double(), dense, None if bias is None else bias.detach().double())


def agrees(run, layer: GeoSparseLinear, x: Tensor, index: Tensor) -> None:
    found = torch.autograd.grad(run(x).square().sum(), x)
    wanted = torch.autograd.grad(exactly(x, layer.weight, index, layer.bias).square().sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.fixture
def x() -> Tensor:
    """Of so many rows that a CPU calls the operator."""
    return torch.randn(1100, N, generator=torch.Generator().manual_seed(9)).requires_grad_()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield


@pytest.mark.parametrize("backend", [None, "aot_eager", "sparsecomp"])
@pytest.mark.parametrize("way", WRITES)
def test_gradients_are_right_after_every_write(way, backend, x):
    layer = layer_of()
    run = torch.compile(layer, backend=backend) if backend else layer
    agrees(run, layer, x, index_of(0))
    for seed in (1, 2):
        WRITES[way](layer.in_index_per_out, index_of(seed))
        for _ in range(2):
            agrees(run, layer, x, index_of(seed))
    assert torch.equal(layer.transposed_source[:-2], index_of(2).flatten())


def test_a_compiled_write_is_followed(x):
    layer = layer_of()
    agrees(layer, layer, x, index_of(0))
    torch.compile(lambda to, value: to.copy_(value), backend="aot_eager")(layer.in_index_per_out.data, index_of(1))
    agrees(layer, layer, x, index_of(1))


def test_an_index_of_another_fan_in_is_followed(x):
    """The kept lists are of another size then."""
    layer, index = layer_of(), index_of(1, (OUT, K + 3))
    lists = layer.lists()
    layer.in_index_per_out, layer.weight = index, nn.Parameter(torch.randn(OUT, K + 3))
    agrees(torch.compile(layer, backend="aot_eager"), layer, x, index)
    found = torch.ops.sparsecomp.gather_dot_input(torch.ones(1, OUT), layer.weight, index, lists, N)
    torch.testing.assert_close(found[0], exactly(torch.eye(N), layer.weight, index).sum(1).float())


def test_a_residual_block_is_right_after_a_write():
    random = torch.Generator().manual_seed(3)
    indices, weights = [index_of(seed, (N, K)) for seed in (0, 1)], torch.randn(2, N, K, generator=random)
    x, scale = torch.randn(5, N, generator=random).requires_grad_(), torch.tensor([0.7])
    kept = [[index, *kept_lists(index, N)] for index in indices]
    for index, seed in zip(indices, (2, 3), strict=True):
        index.numpy()[:] = index_of(seed, (N, K))
    found = torch.autograd.grad(residual_block(x, weights[:1], weights[1:], scale, *kept).square().sum(), x)
    hidden = exactly(x, weights[0], index_of(2, (N, K))).relu()
    out = x.double() + scale.double() * exactly(hidden, weights[1], index_of(3, (N, K)))
    wanted = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("entry", [N, -1, 2**31 - 1])
def test_a_cpu_refuses_an_index_that_reads_beyond_the_inputs(entry):
    layer = layer_of()
    out = layer(torch.randn(1100, N, requires_grad=True))
    layer.in_index_per_out.numpy()[3, 1] = entry
    with pytest.raises(FormatError, match=f"needs 0 to {N - 1}"):
        out.sum().backward()


# -- a promise


@pytest.mark.parametrize("make", [layer_of, lambda: GeoSparseResidualBlock(N, index_of(0, (N, K)))])
@pytest.mark.slow(reason="Inductor compiles forward and backward")
@pytest.mark.slow_cases(1)
def test_lists_of_a_promised_index_are_constants_that_nothing_compares(make, monkeypatch):
    from sparsecomp.passes.cost.decision import Decision
    from sparsecomp.passes.local import own_layer, residual_block

    monkeypatch.setattr(own_layer, "decide", lambda layer: Decision("gather_dot", "said so"))
    monkeypatch.setattr(residual_block, "decide_block", lambda *layers: Decision("residual_block", "said so"))
    given = []

    def seen(grad, weight, index, transposed, inputs):
        given.append(len(transposed))
        return original(grad, weight, index, transposed, inputs)

    overload = torch.ops.sparsecomp.gather_dot_input.default
    original = overload.direct_cpu
    monkeypatch.setattr(overload, "direct_cpu", seen)
    if make is not layer_of:  # as on a GPU
        monkeypatch.setattr(GeoSparseResidualBlock, "is_one_operator", lambda self, x: True)
    x = torch.randn(40, N, requires_grad=True)
    for frozen, lists in ((False, 3), ("buffers", 2)):
        torch.compiler.reset()
        given.clear()
        model = make()
        call = torch.compile(model, backend="sparsecomp", options={"frozen": frozen})
        indices = [one.in_index_per_out for one in model.modules() if isinstance(one, GeoSparseLinear)]
        for seed in (0, 1, 2):
            for index in indices:
                index.copy_(index_of(seed, tuple(index.shape)))
            torch.testing.assert_close(
                torch.autograd.grad(call(x).square().sum(), x), torch.autograd.grad(model(x).square().sum(), x)
            )
        assert given and set(given) == {lists}, sparsecomp.last_report().sites


# -- the kernel


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("shape", "inputs"), [((OUT, K), N), ((1, 1), 1), ((400, 7), 300), ((3, 700), 2)])
def test_the_kernel_follows_a_write_and_keeps_what_it_made(shape, inputs, device):
    from sparsecomp.lowering.local.transposed import compared_lists

    index = index_of(0, shape, inputs).to(device)
    kept = kept_lists(index, inputs)
    for seed in (0, 1, 1, 2):
        given = index_of(seed, shape, inputs)
        index.data.copy_(given)
        pointers, order = compared_lists(index, inputs, kept)
        assert pointers is kept[0] and order is kept[1]
        wanted = given.flatten().long().sort(stable=True)
        assert torch.equal(order.cpu(), wanted.indices.int())
        assert torch.equal(pointers.diff().cpu(), wanted.values.bincount(minlength=inputs).int()) and pointers[0] == 0
        assert torch.equal(kept[2].cpu(), F.pad(given.flatten(), (0, 2)))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_entries_that_are_no_inputs_lead_nowhere_outside_of_memory(device):
    """They are in no list, and come back once they are inputs."""
    from sparsecomp.lowering.local.transposed import compared_lists

    index = index_of(0)
    margins = Margins(kept_lists(index, N), device)
    kept = margins.inner
    read, grad = index.to(device), torch.randn(3, OUT, device=device)
    weight = torch.randn(OUT, K, device=device)
    for entries in ([N, -1, 2**31 - 1, -(2**31)], [N + 5] * K, [1, 2, 3, 2]):
        index = index_of(1)
        index[5], index[OUT - 1] = torch.tensor(entries), torch.tensor(entries).flip(0)
        read.data.copy_(index)
        inside = (index >= 0) & (index < N)
        for _ in range(2):
            pointers, order = compared_lists(read, N, kept)
            ends = pointers.tolist()
            for input in range(N):
                places = (index.flatten() == input).nonzero()[:, 0]
                assert torch.equal(order[ends[input] : ends[input + 1]].cpu().long(), places)
            assert ends[0] == 0 and ends[-1] == int(inside.sum())
            assert margins.are_untouched()
        found = torch.ops.sparsecomp.gather_dot_input.default.direct_cuda(grad, weight, read, kept, N)
        within, where = weight.cpu() * inside, index.where(inside, 0)
        wanted = grad.cpu().double() @ exactly(torch.eye(N), within, where).mT
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_operator_on_a_gpu_follows_a_write(dtype, device):
    index, weight, grad = index_of(0).to(device), torch.randn(OUT, K).to(device, dtype), torch.randn(5, OUT)
    kept, grad = list(kept_lists(index, N)), grad.to(device, dtype)
    for seed in (0, 1):
        index.data.copy_(index_of(seed))  # float64 is the reference's, after the same launch
        found = torch.ops.sparsecomp.gather_dot_input.default.direct_cuda(grad, weight, index, kept, N).double()
        wanted = grad.double() @ exactly(torch.eye(N, device=device), weight, index_of(seed)).mT
        assert (found - wanted).norm() <= (1e-2 if dtype is torch.bfloat16 else 1e-6) * wanted.norm()


def captured_gradient(model: nn.Module, backend: str | None) -> tuple[Tensor, torch.cuda.CUDAGraph, Any]:
    """An input of a model on a GPU, a graph that computes its gradient, and that gradient, which each replay writes."""
    x = torch.randn(64, N, device="cuda", requires_grad=True)
    run = torch.compile(model, backend=backend) if backend else model

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x).square().sum(), x)

    call()
    return x, *graph_of(call)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", [None, "sparsecomp"])
def test_graphs_of_a_training_step_replay_on_other_indices(backend):
    layer = layer_of(device="cuda")
    x, graph, found = captured_gradient(layer, backend)
    for seed in (0, 1, 1, 2):
        layer.in_index_per_out.data.copy_(index_of(seed))
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            wanted = torch.autograd.grad(exactly(x, layer.weight, index_of(seed), layer.bias).square().sum(), x)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", [None, "sparsecomp"])
def test_graphs_of_a_residual_block_replay_on_other_indices(backend):
    exact = GeoSparseResidualBlock(N, index_of(0, (N, K)), residual_alpha_init=0.7).double()
    block = copy.deepcopy(exact).float().cuda()
    x, graph, found = captured_gradient(block, backend)
    for seed in (0, 1, 2):
        for layer in (exact.fc1, block.fc1, exact.fc2, block.fc2):
            layer.in_index_per_out.data.copy_(index_of(seed, (N, K)))
        graph.replay()
        torch.cuda.synchronize()
        leaf = x.detach().cpu().double().requires_grad_()
        (wanted,) = torch.autograd.grad(exact(leaf).square().sum(), leaf)
        torch.testing.assert_close(found[0].cpu().double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_large_indices_are_followed_by_many_programs():
    """More programs than a GPU runs at a time."""
    from sparsecomp.lowering.local.transposed import compared_lists

    n, shape = 200_000, (200_000, 16)
    index = index_of(0, shape, n).cuda()
    kept = kept_lists(index, n)
    for seed in (1, 2):
        index.data.copy_(index_of(seed, shape, n))
        found = compared_lists(index, n, kept)
        wanted = index.flatten().sort(stable=True)
        assert torch.equal(found[1], wanted.indices.int()) and torch.equal(kept[2][:-2], index.flatten())
        assert torch.equal(found[0].diff(), wanted.values.bincount(minlength=n).int())


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_builds(capability):
    printed = compile_in_subprocess(f"""
        from sparsecomp.lowering.sparse.kernels.transposed import compare_launch
        launch = compare_launch(4096, 32768)
        signature = dict.fromkeys(("batch", "rows", "cols", "lines", "entries"), "i32")
        signature |= dict.fromkeys(("own_indices_ptr", "pointers_ptr", "order_ptr", "source_ptr"), "*i32")
        nothing = dict.fromkeys(("own_pointers_ptr", "indices_ptr", "values_ptr", "out_ptr"))
        options = dict(launch.named)
        warps = options.pop("num_warps")
        built = build(launch.kernel, signature, options | nothing, {capability}, num_warps=warps)
        print(len(built.asm["cubin"]) > 0)
    """)
    assert printed.strip() == "True"
