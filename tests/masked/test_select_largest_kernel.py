"""Selection by a count in a kernel, against sorting, to the bit."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES

from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.masked import select_largest as lowered
from sparsecomp.lowering.tuning.operations import all_operations
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.ops import select_largest
from sparsecomp.reference.masks import select_by_sorting

pytestmark = pytest.mark.quick_cases(1)

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = 2048
"""Of the default configuration."""


def special(dtype):
    """Every kind of number, several of most."""
    kind = torch.finfo(dtype)
    kinds = [
        0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1.0, -1.0, kind.tiny, kind.tiny / 2, -kind.tiny / 2,
        kind.smallest_normal, kind.max, kind.min, 0.5, 0.75,
    ]  # fmt: skip
    chosen = torch.randint(len(kinds), (99,), generator=torch.Generator().manual_seed(0))
    return torch.tensor(kinds).to(dtype)[chosen]


def drawn(size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


def wrong(scores, count):
    """Elements that the kernels select otherwise than a sort."""
    count = torch.tensor(count, device=scores.device)
    expected = select_by_sorting(scores.cpu(), count.cpu()).to(scores.device)
    return int((lowered.select_by_kernel(scores, count) != expected).sum())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_number_is_ranked_as_by_a_sort(device, dtype):
    scores = special(dtype).to(device)
    counts = (-1, *range(0, 99, 7), 98, 99, 100, 2**40)
    assert [wrong(scores, count) for count in counts] == [0] * len(counts)
    for alike in (torch.nan, -torch.inf, torch.inf, -0.0, 0.25):
        assert [wrong(torch.full_like(scores, alike), count) for count in (0, 1, 50, 99)] == [0] * 4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_blocks(device, dtype):
    for size in (1, 2, 77, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
        scores = drawn(size, dtype).to(device)
        counts = (0, 1, size // 10, size - 1, size)
        assert [wrong(scores, count) for count in counts] == [0] * len(counts), size


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_ties_across_blocks_and_programs_go_to_the_lowest_index(device):
    scores = torch.zeros(4 * BLOCK + 3, device=device)
    scores[::2] = 1.0
    scores[5] = 2.0
    for count in (1, 2, BLOCK // 2 + 1, BLOCK // 2 + 2, 2 * BLOCK + 2, 2 * BLOCK + 3, 3 * BLOCK):
        assert not wrong(scores, count), count


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_of_several_blocks(device, dtype):
    """As in a vector of millions."""
    scores = drawn(5 * BLOCK + 9, dtype).to(device)
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    problem = lowered.SelectLargest(scores.numel(), str(dtype)[6:], "int64")
    one = lowered.SELECT_LARGEST.candidates(problem, device_of(where))[0]
    for programs in (1, 2):
        config = type(one.config)(**{**one.config, "PROGRAMS": programs})
        kernels = one.template.prepare(problem, config)
        for alike in (False, True):
            given = torch.ones_like(scores) if alike else scores
            count, selected = torch.tensor(7001, device=device), torch.full_like(given, 77, dtype=torch.uint8)
            kernels(given.view(torch.int32 if dtype.itemsize == 4 else torch.int16), count, selected)
            assert torch.equal(selected, select_by_sorting(given.cpu(), count.cpu()).to(device).view(torch.uint8))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_counts_of_every_integer_dtype_and_the_operator_s_own_way_there(device):
    scores = drawn(300, torch.float32).to(device)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        count = torch.tensor(30, dtype=dtype, device=device)
        assert torch.equal(lowered.select(scores, count), select_by_sorting(scores, count))
    turned = scores.view(20, 15).t()[3]
    assert not turned.is_contiguous()
    assert torch.equal(lowered.select(turned, count - 25), select_by_sorting(turned, count - 25))
    for others in (scores.double(), scores[:0], (9 * scores).int()):
        assert torch.equal(lowered.select(others, count), select_by_sorting(others, count))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_the_tuner_can_check_every_candidate(device):
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    operation = all_operations()["select_largest"]
    for problem in (lowered.SelectLargest(9001, "float32", "int64"), lowered.SelectLargest(9000, "float16", "int32")):
        candidates = operation.candidates(problem, device_of(where))
        assert len(candidates) > 5
        assert [fault(operation, problem, where, candidate) for candidate in candidates] == [None] * len(candidates)
        signature = operation.signature(problem, H100)
        assert operation.signature(operation.representative(signature), H100).key == signature.key


def test_the_operator_is_well_formed_and_compiles():
    scores = drawn(50, torch.float32).requires_grad_()
    count = torch.tensor(7)
    torch.library.opcheck(torch.ops.sparsecomp.select_largest.default, (scores.detach(), count))
    compiled = torch.compile(lambda s, c: s * select_largest(s, c), backend="aot_eager", fullgraph=True)
    for given in (count, 7):
        out = compiled(scores, given)
        assert torch.equal(out, scores * select_largest(scores, 7)) and int((out != 0).sum()) == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_millions_of_consistencies(dtype):
    """Most top digits are shared, and in two bytes most values are."""
    scores = torch.rand(11_700_001, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(dtype)
    scores[::3] = 0.5
    for number in (0, 1, 1_170_000, 5_000_000, 8_000_000, 11_700_000, 11_700_001):
        count = torch.tensor(number, device="cuda")
        assert torch.equal(select_largest(scores, count), select_by_sorting(scores, count)), number


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_reads_scores_and_count_anew():
    scores, count = drawn(300_001, torch.float32).cuda(), torch.tensor(7, device="cuda")
    select_largest(scores, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of_tensor, of_number = select_largest(scores, count), select_largest(scores, 5000)
    for new in (0, 1, 30_000, 300_001, 300_002, -1):
        count.fill_(new)
        scores.copy_(scores.roll(1) * 1.5)
        graph.replay()
        for selected, number in ((of_tensor, new), (of_number, 5000)):
            assert torch.equal(selected.cpu(), select_by_sorting(scores.cpu(), torch.tensor(number))), (new, number)


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize(("capability", "width"), [(80, 32), (90, 32), (90, 16)])
def test_kernels_build_with_whole_vectors(capability, width):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.masked.kernels.select_largest import count_kernel, mark_kernel
        shared = dict(INFINITY=0x7C00, WIDTH={width}, BLOCK=2048)
        for kernel, more in ((count_kernel, dict(KNOWN=0, own_ptr=None)), (count_kernel, dict(KNOWN=1)),
                             (mark_kernel, dict(PROGRAMS=2048))):
            types = {{n: "*i32" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}}
            types |= dict(scores_ptr="*i{width}", count_ptr="*i64", selected_ptr="*u8")
            built = build(kernel, types, dict(**shared, **more), {capability}, whole=("chunk",), num_warps=4)
            ptx = built.asm["ptx"]
            print("ld.global.v4" in ptx, ".local" not in ptx)
        """
    )
    assert printed.split() == ["True"] * 6
