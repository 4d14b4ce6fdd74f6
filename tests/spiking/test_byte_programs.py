"""Random programs of spikes that are bytes, with sums, views, writes and layers: rules leave all bits as they are."""

import random
from collections.abc import Callable

import pytest
import torch
from rewriting import rewritten
from torch import Tensor

STEPS, BATCH, CHANNELS = 4, 2, 8
HOW = ([1, 1], [0, 0], [1, 1], 1, 3, 1.0, 20.0, True, STEPS, None, 0.0, None, None, None, None)
NEURON = (0.0, "if", 1.0, None, False, 0.5, 0.0, True)


JOINS: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, torch.mul, lambda a, b: a * (1 - b)]


class Program:
    """Operations on spikes, drawn by a seed; all that there is at the end is returned."""

    def __init__(self, seed: int, length: int) -> None:
        draw = random.Random(seed)
        names = [*OPERATIONS, *["layer", "add"] * 2, *["block"] * 5, "bytes written"]
        self.steps = [(draw.choice(names), draw.randrange(1 << 20), draw.randrange(1 << 20)) for _ in range(length)]
        self.weight = torch.randn(CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(seed)) / 2

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        narrow = [(x > 0).to(torch.int8), (x > 0.5).to(torch.int8)]
        floats = [one.float() for one in narrow]
        for name, left, right in self.steps:
            if name in ("layer", "block"):
                residual = narrow[right % len(narrow)]
                spikes, last = self.fire(narrow[left % len(narrow)])
                if name == "block":
                    narrow[:0] = [JOINS[right % 3](residual, spikes)]
                if name == "layer" or right % 4 == 0:
                    floats[:0] = [spikes.float()]
                floats += [last] * (right % 5 == 0)
            elif name == "bytes written":
                narrow[left % len(narrow)].bitwise_xor_(1)
            else:
                a, b = (floats[place % min(len(floats), 6)] for place in (left, right))
                made = OPERATIONS[name](a, b)
                floats += [] if made is None else [made]
        return *floats, *narrow

    def fire(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Spikes of a layer with its neurons, and last membranes at every step."""
        counts = counts.flatten(0, 1)[..., None, None]
        spikes, last, _ = torch.ops.sparsecomp.conv_lif.default(counts, self.weight, None, *HOW, *NEURON)
        return spikes.flatten(2), last.flatten(1).expand(STEPS, -1, -1).clone()


def halved(a: Tensor, b: Tensor) -> None:
    a.mul_(0.5)


def row_written(a: Tensor, b: Tensor) -> None:
    a[1] = b[0]


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "iand": lambda a, b: a * (1.0 - b),
    "more": lambda a, b: a + 2,
    "in place": lambda a, b: a.add_(b),
    "times in place": lambda a, b: a.mul_(b),
    "halved": halved,
    "row written": row_written,
    "bytes": lambda a, b: a.to(torch.int8).float(),
    "flipped": lambda a, b: a.flip(0),
    "same view": lambda a, b: a.view(STEPS, BATCH, CHANNELS),
    "pooled": lambda a, b: torch.nn.functional.max_pool1d(a, 3, 1, 1),
    "turned": lambda a, b: a.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(60))
def test_bits_are_eagers(seed):
    x = torch.randn(STEPS, BATCH, CHANNELS, generator=torch.Generator().manual_seed(seed))
    program = Program(seed, 4 + seed % 9)
    with torch.no_grad():
        expected = program(x.clone())
        found, _ = rewritten(program, x.clone(), strict=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert torch.equal(ours.float().signbit(), theirs.float().signbit()) and ours.stride() == theirs.stride()


@pytest.mark.slow(reason="rewrites forty programs")
def test_the_programs_have_sites_of_both_rules():
    made = dict.fromkeys(["byte_sums", "fuse_residual", "left"], 0)
    for seed in range(40):
        x = torch.randn(STEPS, BATCH, CHANNELS, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            _, report = rewritten(Program(seed, 4 + seed % 9), x, strict=True)
        for site in report.sites:
            made[site.rule if site.rewritten else "left"] += 1
    assert all(count > 15 for count in made.values()), made
