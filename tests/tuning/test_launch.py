"""A launch through the driver passes what Triton's own launcher would, and steps aside where it must."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

from sparsecomp.lowering.launch import launch
from sparsecomp.lowering.launch.launch import Launch

triton = pytest.importorskip("triton")


class Driver:
    """Stands for libcuda: reads the parameter block as the GPU would."""

    def __init__(self, sizes, status=0):
        self.sizes, self.status, self.calls = sizes, status, []

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        block = [ctypes.string_at(parameters[i], size) for i, size in enumerate(self.sizes)]
        head = (function.value, gx.value, gy.value, gz.value, bx.value, by.value, bz.value, shared.value, stream.value)
        self.calls.append((head, block, len(parameters)))
        return self.status


class Kernel:
    """Stands for a Triton function: `kernel[grid](*arguments, **named)` compiles, launches and returns the compiled."""

    def __init__(self, signature, **metadata):
        plain = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "num_warps": 8, "shared": 512}
        scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
        self.calls = []
        self.compiled = SimpleNamespace(
            metadata=SimpleNamespace(**{**plain, **scratch, **metadata}),
            src=SimpleNamespace(signature=dict(enumerate(signature))), function=0x7F00DEADBEEF,
        )  # fmt: skip

    def __getitem__(self, grid):
        def run(*arguments, **named):
            self.calls.append((grid, arguments, named))
            return self.compiled

        return run


@pytest.fixture
def driver(monkeypatch):
    """Eight-byte pointers and a 4-, an 8- and a 4-byte number; two scratch pointers."""
    driver = Driver([8, 8, 4, 8, 4, 8, 8])
    monkeypatch.setattr(launch, "cuda_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the device number of a CPU tensor
    active = SimpleNamespace(get_current_stream=lambda device: 0xABC)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return driver


SIGNATURE = ("*fp32", "constexpr", "*i8", "i32", "i64", "constexpr", "fp32", "constexpr")


def made(kernel):
    return Launch(kernel, (5, 2), (-7, 2**40, 1, 0.5), {"BLOCK": 64}, num_warps=8)


def aligned(size, dtype=torch.float32):
    return torch.zeros(size + 64, dtype=dtype)[: size + 32]


def test_the_first_launch_is_tritons_and_the_next_pass_the_same_to_the_driver(driver):
    kernel = Kernel(SIGNATURE)
    run = made(kernel)
    for _ in range(3):
        x, y = aligned(8), aligned(8, torch.int8)
        run(x, None, y)
        last = (x.data_ptr(), y.data_ptr())
    assert [(grid, named) for grid, _, named in kernel.calls] == [((5, 2), {"BLOCK": 64, "num_warps": 8})]
    head, block, length = driver.calls[-1]
    assert head == (0x7F00DEADBEEF, 5, 2, 1, 8 * 32, 1, 1, 512, 0xABC)
    assert struct.unpack("<Q", block[0]) + struct.unpack("<Q", block[1]) == last
    assert struct.unpack("<i", block[2]) == (-7,)
    assert struct.unpack("<q", block[3]) == (2**40,)
    assert struct.unpack("<f", block[4]) == (0.5,)
    assert block[5:] == [bytes(8), bytes(8)] and length == 7
    assert len(driver.calls) == 2


@pytest.mark.parametrize(
    "metadata",
    [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"launch_pdl": True}, {"global_scratch_size": 64}],
)
def test_what_needs_more_than_a_plain_launch_stays_with_triton(driver, metadata):
    kernel = Kernel(SIGNATURE, **metadata)
    run = made(kernel)
    for _ in range(3):
        run(aligned(8), None, aligned(8, torch.int8))
    assert len(kernel.calls) == 3 and not driver.calls


def test_an_address_that_triton_would_compile_another_kernel_for_goes_through_triton(driver):
    kernel = Kernel(SIGNATURE)
    run = made(kernel)
    x, y = aligned(8), aligned(8, torch.int8)
    run(x[1:], None, y)  # nothing can be learnt from this one
    run(x, None, y)
    run(x, None, y[3:])
    run(x, None, y)
    assert len(kernel.calls) == 3 and len(driver.calls) == 1


def test_a_profiler_that_listens_to_triton_hears_every_launch(driver):
    from triton import knobs

    kernel = Kernel(SIGNATURE)
    run = made(kernel)
    x, y = aligned(8), aligned(8, torch.int8)
    run(x, None, y)
    knobs.runtime.launch_enter_hook.add(print)
    try:
        run(x, None, y)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    run(x, None, y)
    assert len(kernel.calls) == 2 and len(driver.calls) == 1


def test_a_failing_launch_raises(driver):
    driver.status = 719
    run = made(Kernel(SIGNATURE))
    x, y = aligned(8), aligned(8, torch.int8)
    run(x, None, y)
    with pytest.raises(RuntimeError, match="719"):
        run(x, None, y)


def test_a_tensor_that_is_no_pointer_to_the_kernel_stays_tritons_business(driver):
    """The driver is given one address a pointer, in order: with a tensor more they would be the wrong ones."""
    kernel = Kernel(SIGNATURE)
    run = made(kernel)
    for _ in range(3):
        run(aligned(8), aligned(8), aligned(8, torch.int8))
    assert len(kernel.calls) == 3 and not driver.calls


@pytest.mark.parametrize(("devices", "current", "direct"), [(1, 5, True), (2, -1, True), (2, 5, False)])
def test_a_launch_for_another_device_than_the_current_one_is_tritons(driver, monkeypatch, devices, current, direct):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    kernel = Kernel(SIGNATURE)
    run = made(kernel)
    x, y = aligned(8), aligned(8, torch.int8)
    run(x, None, y)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    run(x, None, y)
    assert len(driver.calls) == direct and len(kernel.calls) == 2 - direct


def test_each_launch_goes_to_the_stream_that_is_current_then(driver, monkeypatch):
    streams = [0, 7, 7, 0]
    active = SimpleNamespace(get_current_stream=lambda device: streams.pop(0))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    run = made(Kernel(SIGNATURE))
    x, y = aligned(8), aligned(8, torch.int8)
    for _ in range(5):
        run(x, None, y)
    assert [head[-1] for head, _, _ in driver.calls] == [None, 7, 7, None]  # ctypes reads address 0 as None
