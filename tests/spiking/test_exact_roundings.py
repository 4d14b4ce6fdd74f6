"""Which roundings of a neuron in half precision are left out, and that its bits stay the same."""

import random

import pytest
import torch

from sparsecomp.passes.spiking.exact_roundings import holds, without_exact_roundings
from sparsecomp.reference.neuron import PLACES, ROUNDINGS, Instruction, Neuron, neuron_of, neuron_reference

NUMBERS = [0.0, 1.0, 0.5, -0.0, 0.1, 1e-7]
SPECIAL = [0.0, -0.0, 1.0, 6e-8, -6e-8, 65504.0, -65504.0, float("inf"), float("-inf"), float("nan"), 1e-4, 3.0]
ARITHMETIC = ("add", "sub", "mul", "neg", "max", "min", "abs")


def written_at_random(seed: int, half: str) -> Neuron:
    """Operations as torch does them in half precision: each of numbers is rounded."""
    draw = random.Random(seed)
    code: list[Instruction] = []
    numbers = [PLACES["x"], PLACES["v0"], PLACES["v1"], PLACES["p0"], *(PLACES[f"n{i}"] for i in range(len(NUMBERS)))]
    truths: list[int] = []

    def do(operation: str, *operands: int) -> int:
        code.append(Instruction(operation, *operands))
        return len(PLACES) + len(code) - 1

    for _ in range(draw.randint(4, 12)):
        kind = draw.random()
        if kind < 0.25 or not truths:
            truths.append(do(draw.choice(["ge", "gt", "le", "lt"]), *draw.choices(numbers[-6:] + numbers[:4], k=2)))
        elif kind < 0.45:
            numbers.append(do("float", draw.choice(truths)))
        elif kind < 0.55:
            numbers.append(do("where", draw.choice(truths), *draw.choices(numbers, k=2)))
        else:
            operation = draw.choice(ARITHMETIC)
            operands = draw.choices(numbers, k=1 if operation in ("neg", "abs") else 2)
            numbers.append(do(half, do(operation, *operands)))
    return Neuron(tuple(code), draw.choice(truths), (numbers[-1], draw.choice(numbers)))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("half", ROUNDINGS)
@pytest.mark.parametrize("block", range(20))
def test_random_neurons_keep_their_bits(half: str, block: int) -> None:
    shorter = 0
    for seed in range(50 * block, 50 * block + 50):
        neuron, generator = written_at_random(seed, half), torch.Generator().manual_seed(seed)

        def some(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            values = torch.randn(shape, generator=generator)
            special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]
            return torch.where(torch.rand(shape, generator=generator) < 0.5, values, special).to(ROUNDINGS[half])

        x, v0, p0 = some(3, 400).float(), some(400).float(), some(400).float()
        v1 = torch.randn(400, generator=generator)
        found = without_exact_roundings(neuron, NUMBERS, half, [True, False], [True])
        results = [
            neuron_reference(x, [v0, v1], [0.0, 0.0], [p0], NUMBERS, str(one), True) for one in (neuron, found)
        ]
        for one, other in zip(*results, strict=True):
            same = one.view(torch.int8 if one.dtype is torch.int8 else torch.int32) == other.view_as(one).view(
                torch.int8 if one.dtype is torch.int8 else torch.int32
            )
            assert (same | (one.isnan() & other.isnan())).all(), (seed, str(neuron), str(found))
        shorter += len(found.code) < len(neuron.code)
    assert shorter > 25


def test_what_is_left_of_a_leaky_neuron() -> None:
    """Three roundings of twelve: of the distance from the membrane, of its half, and of the sum."""
    step = (
        "t0 = sub v0 n0; t1 = float16 t0; t2 = sub x t1; t3 = float16 t2; t4 = mul t3 n2; t5 = float16 t4; "
        "t6 = add v0 t5; t7 = float16 t6; t8 = sub t7 n1; t9 = float16 t8; t10 = ge t9 n0; t11 = float t10; "
        "t12 = mul t11 n0; t13 = float16 t12; t14 = sub n1 t11; t15 = float16 t14; t16 = mul t15 t7; "
        "t17 = float16 t16; t18 = add t13 t17; t19 = float16 t18; spike t10; v0 t19"
    )
    left = without_exact_roundings(neuron_of(step), NUMBERS, "float16", [True], [])
    assert str(left) == (
        "t0 = sub x v0; t1 = float16 t0; t2 = mul t1 n2; t3 = float16 t2; t4 = add v0 t3; t5 = float16 t4; "
        "t6 = sub t5 n1; t7 = ge t6 n0; t8 = float t7; t9 = sub n1 t8; t10 = mul t9 t5; t11 = add n0 t10; "
        "spike t7; v0 t11"
    )
    assert str(without_exact_roundings(neuron_of(step), NUMBERS, "float16", [False], [])).count("float16") == 4


def test_numbers_that_a_precision_holds() -> None:
    assert holds(0.1, "float16") is False and holds(0.5, "bfloat16") and holds(1.001, "float16") is False
