"""A call that is done again by address computes what the implementation computes, or goes to it."""

import ctypes

import pytest
import torch

from sparsecomp.lowering.launch import dispatch, replay, watch
from sparsecomp.lowering.launch.replay import Replayed
from sparsecomp.nn import GeoSparseLinear, SparseLinear

pytest.importorskip("triton")


class Direct:
    """Stands for a launch past Triton: out = a + b, of float32 at these addresses."""

    def __init__(self, size):
        self.size, self.free, self.launches, self.listeners = size, True, 0, ()

    def is_free(self):
        return self.free

    def launch(self, pointers):
        self.launches += 1
        a, b, out = ((ctypes.c_float * self.size).from_address(pointer) for pointer in pointers)
        for i in range(self.size):
            out[i] = a[i] + b[i]


class Add:
    """Stands for a `Launch` of that kernel."""

    def __init__(self, size):
        self.direct = Direct(size)

    def __call__(self, a, b, out):
        Direct.launch(self.direct or Direct(out.numel()), [tensor.data_ptr() for tensor in (a, b, out)])
        if watch.HERE.watcher is not None:
            watch.HERE.watcher.launched(self, (a, b, out))


def implementation(body, size=64):
    """`body` of a kernel and operands, counting its calls."""
    add, calls = Add(size), []

    def call(*operands):
        calls.append(1)
        return body(add, *operands)

    return Replayed(call), add, calls


def aligned(*shape):
    """Random numbers at an address of the kind that a GPU's allocator gives."""
    size = torch.Size(shape).numel()
    memory = torch.randn(size + 4)
    start = (-memory.data_ptr() // 4) % 4
    return memory[start : start + size].view(shape)


@pytest.fixture(autouse=True)
def _aligned_results(request, monkeypatch):
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr("sparsecomp._compat.empty_of", lambda device: lambda shape, stride, dtype: aligned(*shape))


def plain(add, x, y):
    out = watch.allocate(tuple(x.shape), x.stride(), x.dtype, x.device)
    add(x, y, out)
    return out


def of_views(add, x, pair):
    """Operands that are looked at in another shape, a workspace, a torch operator between, and a tuple of views."""
    between = torch.empty_like(x)
    add(x.view(-1), pair[1].view(4, 16), between.view(-1))
    doubled = between * 2
    out = torch.empty(x.shape)
    add(doubled, pair[0][4:], out)
    return out.view(4, 16), doubled, None


def in_place(add, x, y):
    out = torch.empty_like(x)
    add(x, y, out)
    return out.mul_(3.0)


BODIES = {
    "plain": (plain, lambda: (aligned(64), aligned(64))),
    "views": (of_views, lambda: (aligned(64), [aligned(68), aligned(64)])),
    "in place": (in_place, lambda: (aligned(64), aligned(64))),
}


@pytest.mark.parametrize("body, operands", BODIES.values(), ids=BODIES)
def test_it_gives_the_implementations_results_from_other_memory(body, operands):
    replayed, add, calls = implementation(body)
    results = []
    for _ in range(5):
        given = operands()
        found, expected = replayed(*given), body(Add(64), *given)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        results.append(found)
    assert len(calls) == 1
    assert add.direct.launches == 5 * (2 if body is of_views else 1)
    first = [one if isinstance(one, torch.Tensor) else one[0] for one in results]
    assert len({tensor.data_ptr() for tensor in first}) == 5  # a result is memory of its own


def test_only_what_somebody_reads_is_made_again(monkeypatch):
    """Tensors without memory that describe a problem, views, workspaces that nothing was launched with."""
    made = []
    monkeypatch.setattr(
        "sparsecomp._compat.empty_of", lambda device: lambda shape, *_: made.append((device.type, shape)) or aligned(64)
    )

    def body(add, x, y):
        torch.empty(7, device="meta").expand(3, 7).mm(torch.empty(7, 2, device="meta"))
        torch.empty(5).fill_(1.0)  # who writes may be seen
        torch.empty(9)
        out = torch.empty_like(x)
        add(x, y, out)
        return out

    replayed, _, calls = implementation(body)
    replayed(aligned(64), aligned(64))
    made.clear()
    x, y = aligned(64), aligned(64)
    assert torch.equal(replayed(x, y), x + y)
    assert len(calls) == 1 and made == [("cpu", (5,)), ("cpu", (64,))]


def test_what_is_kept_for_an_operands_memory_is_read_again():
    x, y, kept = aligned(64), aligned(64), aligned(64)

    def body(add, x, y):
        watch.note_kept(x, kept)
        add(x, y, kept)
        return kept.detach()

    replayed, add, calls = implementation(body)
    for _ in range(3):
        x.data.normal_()
        assert torch.equal(replayed(x, y), x + y) and torch.equal(kept, x + y)
    assert len(calls) == 1 and add.direct.launches == 3
    other = aligned(64)
    assert torch.equal(replayed(other, y), other + y)
    assert len(calls) == 2  # of another operand's memory only the implementation knows what is kept


def test_what_is_kept_for_no_operand_is_not_read_again():
    kept = aligned(64)

    def body(add, x, y):
        watch.note_kept(x * 1, kept)
        add(x, y, kept)
        return kept.detach()

    replayed, _, calls = implementation(body)
    for _ in range(5):
        replayed(aligned(64), aligned(64))
    assert len(calls) == 5


KEPT = aligned(64)


def of_kept_memory(add, x, y):
    out = torch.empty_like(x)
    add(x, KEPT, out)
    return out


def of_contents(add, x, y):
    out = torch.empty_like(x)
    add(x, y if x[0] > 0 else x, out)
    return out


def of_found_places(add, x, y):
    out = torch.empty_like(x)
    add(x, y, out)
    return out[x.nonzero()[:, 0]]


def of_another_library(add, x, y):
    watch.do_not_note()
    return plain(add, x, y)


def without_a_kernel(add, x, y):
    return x + y


def of_another_layout(add, x, y):
    out = torch.empty_like(x)
    add(x, y, out)
    found = torch.sparse_csr_tensor(torch.tensor([0, 64]), torch.arange(64), out, (1, 64))
    return (found @ y[:, None])[0]


DEPENDENT = [of_kept_memory, of_contents, of_found_places, of_another_library, of_another_layout, without_a_kernel]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("body", DEPENDENT)
def test_what_does_not_follow_from_the_operands_goes_to_the_implementation(body):
    replayed, _, calls = implementation(body)
    for number in range(1, 6):
        x, y = aligned(64), aligned(64)
        x[0] = (-1) ** number
        torch.testing.assert_close(replayed(x, y), body(Add(64), x, y), rtol=0, atol=0)
        assert len(calls) == number


def test_one_tensor_in_two_places_may_be_two_in_the_next_call():
    replayed, _, calls = implementation(plain)
    x, y = aligned(64), aligned(64)
    assert torch.equal(replayed(x, x), x + x)
    assert torch.equal(replayed(x, y), x + y)  # this one is noted
    assert torch.equal(replayed(y, x), x + y)
    assert torch.equal(replayed(x, x), x + x)
    assert len(calls) == 2


def test_an_address_that_no_vector_is_read_from_goes_to_the_implementation():
    replayed, _, calls = implementation(plain)
    x, y = aligned(68), aligned(64)
    for start in (0, 4, 1, 2, 4):
        given = x[start : start + 64]
        assert torch.equal(replayed(given, y), given + y)
    assert len(calls) == 3


def test_a_profiler_that_listens_and_a_choice_that_was_forgotten_are_heeded():
    replayed, add, calls = implementation(plain)
    x, y = aligned(64), aligned(64)
    for _ in range(3):
        replayed(x, y)
    assert len(calls) == 1
    add.direct.free = False
    replayed(x, y)
    add.direct.free = True
    dispatch.forget()
    replayed(x, y)
    assert len(calls) == 3


def test_a_kernel_that_cannot_pass_triton_is_given_up_after_three_calls():
    replayed, add, calls = implementation(plain)
    x, y = aligned(64), aligned(64)
    add.direct = None
    for number in range(1, 7):
        assert torch.equal(replayed(x, y), x + y)
        assert len(calls) == number


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("training", [False, True])
def test_a_compiled_graph_does_its_sites_again_by_address(training, monkeypatch):
    """Sparse layers and a layer of fixed fan-in, in new memory in each call, beside the layers as written."""
    calls, start = [], replay.Replayed.__init__

    def counted(site, implementation):
        calls.append(0)
        number = len(calls) - 1

        def call(*arguments):
            calls[number] += 1
            return implementation(*arguments)

        start(site, call)

    monkeypatch.setattr(replay.Replayed, "__init__", counted)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        SparseLinear.from_linear(torch.nn.Linear(1024, 1024), sparsity=0.95), torch.nn.ReLU(),
        GeoSparseLinear(1024, 1024, torch.randint(1024, (1024, 8))), torch.nn.GELU(),
        SparseLinear.from_linear(torch.nn.Linear(1024, 1024), sparsity=0.98),
    ).cuda()  # fmt: skip
    compiled, kept = torch.compile(net, backend="sparsecomp"), []
    for _ in range(6):
        x = torch.randn(64, 1024, device="cuda", requires_grad=training)
        with torch.set_grad_enabled(training):
            found, expected = compiled(x), net(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        kept.append(found)
        if training:
            ours, theirs = (torch.autograd.grad(out.sum(), [x, *net.parameters()]) for out in (found, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            with torch.no_grad():
                for parameter, grad in zip(net.parameters(), ours[1:], strict=True):
                    parameter -= 1e-4 * grad
    assert len({tensor.data_ptr() for tensor in kept}) == 6
    assert calls and max(calls) <= 2
