"""Random programs: what the analysis claims of them holds, and what the rewrite makes of them computes the same.

`python -m tests.fuzz --programs N --seed S` runs any number and prints small reproducers.
"""

import logging

import pytest
import torch

from tests.fuzz.operators import STEPS, generate
from tests.fuzz.oracle import Broken, case_of, check, minimised, reproducer

PROGRAMS, BATCH = 500, 50


@pytest.fixture(autouse=True)
def quiet(one_thread: None):
    """torch logs what its stand-ins refuse."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(5)
@pytest.mark.parametrize("first", range(0, PROGRAMS, BATCH))
@pytest.mark.filterwarnings("ignore")
def test_random_programs(first: int) -> None:
    refused = rewritten = 0
    for seed in range(first, first + BATCH):
        try:
            case = case_of(generate(seed))
            outcome = check(case)
        except Broken:
            refused += 1
            continue
        rewritten += outcome.rewritten
        if outcome.failure is not None:
            small = minimised(case, outcome.failure)
            pytest.fail(f"seed {seed}: {outcome.failure.kind}: {outcome.failure.detail}\n{reproducer(small)}")
    # the programs must be worth running
    assert refused < BATCH / 5 and rewritten > BATCH / 4


@pytest.mark.slow(reason="hundreds of programs")
def test_a_wrong_claim_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net holds: with a transfer function that claims too much, it fails, and the reproducer is a few lines."""
    from sparsecomp.passes.facts.registry import TRANSFERS
    from sparsecomp.reference import facts

    monkeypatch.setitem(TRANSFERS, "abs", lambda op, known: facts.binary(op.node.name))
    for seed in range(200):
        try:
            case = case_of(generate(seed))
            failure = check(case).failure
        except Broken:
            continue
        if failure is not None:
            break
    assert failure is not None and failure.kind == "fact"
    small = minimised(case, failure)
    calls = [node for node in small.gm.graph.nodes if node.op.startswith("call")]
    assert len(calls) <= 8 and any("abs" in str(node.target) for node in calls)


def test_the_same_seed_is_the_same_program() -> None:
    one, other = case_of(generate(7)), case_of(generate(7))
    assert one.gm.code == other.gm.code
    assert all(torch.equal(a, b) for a, b in zip(one.inputs, other.inputs, strict=True))


def test_every_step_can_be_taken() -> None:
    taken: set[str] = set()
    for name, step in STEPS.items():
        for seed in range(40):
            program = generate(seed)
            before = len(program.graph.nodes)
            try:
                step(program)
            except Exception:
                continue
            if len(program.graph.nodes) > before:
                taken.add(name)
                break
    assert taken == set(STEPS)
