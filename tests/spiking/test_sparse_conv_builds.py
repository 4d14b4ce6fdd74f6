"""The kernels of the event-driven and skipping convolutions build for GPUs that need not be present."""

import pytest
from compile_kernel import compile_in_subprocess

pytestmark = pytest.mark.slow(reason="builds for a GPU")

PRELUDE = """
pointers = dict(starts_ptr="*i32", total_ptr="*i32", codes_ptr="*i32", events_ptr="*i32", rows_ptr="*i32",
                count_ptr="*i32", active_ptr="*i8", bytes_ptr="*i8", scale_ptr="*fp32", bias_ptr="*fp32",
                factor_ptr="*fp32")
numbers = dict(multiplier="fp32")
def ptx(kernel, element, constants, capability, **options):
    types = {n: pointers.get(n, element if n.endswith("_ptr") else numbers.get(n, "i32")) for n in kernel.arg_names}
    return build(kernel, types, constants, capability, **options).asm["ptx"]
"""


def compiled(body: str) -> str:
    return compile_in_subprocess(PRELUDE + body)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("element", ["*fp32", "*fp16", "*bf16"])
def test_event_kernels(capability, element):
    printed = compiled(f"""
from sparsecomp.lowering.spiking.kernels.event_conv import event_conv_kernel, events_kernel, pack_event_weight_kernel
for kernel, constants, warps in (
    (events_kernel, dict(WORDS=2, BLOCK=128), 4),
    (event_conv_kernel, dict(R=3, S=3, SPAN=3, HAS_BIAS=True, P=4, E=2, KS=64), 1),
    (event_conv_kernel, dict(R=3, S=3, SPAN=1, HAS_BIAS=False, P=1, E=2, KS=256), 1),
    (pack_event_weight_kernel, dict(S=3, BD=32, KS=64), 4),
):
    text = ptx(kernel, "{element}", constants, {capability}, num_warps=warps)
    print(".local" not in text)
""")
    assert printed.split() == ["True"] * 4


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("element", "loads"), [("*fp32", "ld.global.v4"), ("*i8", "ld.global.v4")])
def test_prescan_reads_in_whole_vectors(capability, element, loads):
    printed = compiled(f"""
from sparsecomp.lowering.spiking.kernels.event_conv import events_kernel
print(ptx(events_kernel, "{element}", dict(WORDS=2, BLOCK=128), {capability}, num_warps=4))
""")
    assert loads in printed.replace("\t", " ") or "v4.b32" in printed


@pytest.mark.parametrize("capability", [80, 90])
def test_skip_kernels(capability):
    printed = compiled(f"""
from sparsecomp.lowering.spiking.kernels.skip_conv import list_rows_kernel, scan_pixels_kernel
for kernel, constants in (
    (scan_pixels_kernel, dict(BP=64, BC=64)),
    (list_rows_kernel, dict(R=3, S=3, HAS_BIAS=True, BM=128, BN=32)),
):
    print(".local" not in ptx(kernel, "*fp32", constants, {capability}, num_warps=4))
""")
    assert printed.split() == ["True"] * 2


@pytest.mark.parametrize("capability", [80, 90])
def test_binary_kernel_with_listed_rows(capability):
    printed = compiled(f"""
from sparsecomp.lowering.spiking.kernels.binary_conv import binary_conv_kernel as kernel
constants = dict(T=1, R=3, S=3, GROUPS=1, DIGITS=3, HAS_BIAS=True, VOLUMES=False, EVEN_C=True, VECTOR=16, BM=128, BN=64,
                 BK=64)
pointers.update(x_ptr="*i8", w_ptr="*i8")
print(ptx(kernel, "*fp32", constants, {capability}, num_warps=4, num_stages=3))
""")
    assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in printed


def test_hopper_kernel_with_listed_rows():
    printed = compiled("""
from triton.experimental.gluon._runtime import GluonASTSource
from sparsecomp.lowering.spiking.kernels.binary_conv_hopper import binary_conv_hopper_kernel as kernel
constants = dict(R=3, S=3, GROUPS=1, DIGITS=3, HAS_BIAS=True, BM=128, BN=64, BK=64, STAGES=4, num_warps=4)
pointers.update(x_ptr="*i8", w_ptr="*i8")
print(ptx(kernel, "*fp32", constants, 90, source=GluonASTSource, num_warps=4))
""")
    assert "wgmma.mma_async" in printed and ".local" not in printed
