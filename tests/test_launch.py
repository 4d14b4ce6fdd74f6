"""What a launcher remembers, and that it hands a kernel the same arguments the second time."""

import torch

from sparsecomp.lowering import launch
from sparsecomp.lowering.launch import Launcher


class Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """Stands for a Triton function: `kernel[grid](*arguments, **constants)` compiles and launches."""

    arg_names = ["x", "n", "A", "B"]

    def __init__(self):
        self.compilations, self.calls = 0, []

    def __getitem__(self, grid):
        def run(*arguments, **named):
            self.compilations += 1
            self.calls.append((grid, (*arguments, *(named[name] for name in self.arg_names[len(arguments) :]))))
            return Compiled(self.calls)

        return run


def test_the_second_launch_of_a_signature_compiles_nothing_and_passes_the_same():
    kernel = Kernel()
    launcher = Launcher(kernel)
    x = torch.zeros(8)
    for _ in range(3):
        launcher((5,), (x, 8), {"B": 2, "A": 1}, num_warps=4)
    assert kernel.compilations == 1
    assert [arguments[1:] for _, arguments in kernel.calls] == [(8, 1, 2)] * 3
    assert [grid for grid, _ in kernel.calls] == [(5,), (5, 1, 1), (5, 1, 1)]


def test_what_triton_specialises_on_is_another_signature():
    kernel = Kernel()
    launcher = Launcher(kernel)
    x = torch.zeros(64)
    for tensor, n, a, warps in (
        (x, 8, 1, 4), (x.double(), 8, 1, 4), (x[1:], 8, 1, 4), (None, 8, 1, 4),
        (x, 9, 1, 4), (x, 8, 0, 4), (x, 8, 1, 8),
    ):  # fmt: skip
        launcher((1,), (x, tensor, n), {"A": a, "B": 2}, num_warps=warps)
    assert kernel.compilations == 7


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(launch, "_MOST_REMEMBERED", 3)
    kernel = Kernel()
    launcher = Launcher(kernel)
    for n in (1, 2, 3, 4, 4, 1):
        launcher((1,), (torch.zeros(1), n), {"A": 1, "B": 2})
    assert kernel.compilations == 5
    assert len(launcher._remembered) == 3
