"""What a change of a pattern costs: what the report says of it, and that it does not wait for a GPU."""

import copy
import io

import pytest
import torch
from torch import nn

import sparsecomp
from sparsecomp import Unstructured
from sparsecomp.formats import CSC, CSR
from sparsecomp.formats.indices import searched_lines, spread_lines
from sparsecomp.nn import SparseLinear
from sparsecomp.reference import patterns
from sparsecomp.runtime import PatternManager, RigL


def network(format=CSR) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    sparsecomp.sparsify(model, Unstructured(0.75, by="random"))
    for place in (0, 2):
        model[place] = SparseLinear(model[place].weight.matrix.to(format), model[place].bias)
    return model


def notes(model: nn.Module) -> list[str]:
    report = sparsecomp.explain(model, torch.randn(4, 16))
    return [note for note in report.notes if "its pattern may change" in note]


def test_the_report_says_that_a_pattern_may_change_and_what_that_costs():
    model = network()
    assert not notes(model)
    optimizer = torch.optim.AdamW(model.parameters())
    RigL(model, optimizer, every=50, end=700, filter=lambda layer, name: name == "0")
    (note,) = notes(model)
    # 128 entries of 4 bytes in values, indices, transposed indices and order; pointers of 33 and 17; the source of all
    written = 4 * (4 * 128 + 33 + 17 + 33 + 128 + 2)
    assert note == (
        f"0: its pattern may change (RigL, every 50 steps to step 700): each change writes {written / 1000:.3g} kB, "
        "and 512 bytes for the gradient and for each state of the optimizer; nothing is compiled again while it has "
        "128 entries"
    )
    manager = PatternManager(model[2], [optimizer])
    manager.reserve(200)
    found = notes(model)
    assert len(found) == 2 and found[1].startswith("2: its pattern may change (a PatternManager's): ")
    assert found[1].endswith("nothing is compiled again up to 200 entries")
    assert not notes(copy.deepcopy(model))  # whose patterns nobody changes


def test_a_fixed_pattern_is_not_told_of_and_files_read_as_before():
    model = network()
    PatternManager(model[0], policy="static")
    assert not notes(model)
    PatternManager(model[0])
    file = io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["0.values"], model[0].values)


@pytest.mark.slow(reason="compiled by Inductor")
def test_a_compiled_model_tells_of_it_too():
    model = network()
    RigL(model, torch.optim.AdamW(model.parameters()), end=10)
    traced = sparsecomp.optimize(model, torch.randn(4, 16))
    assert sum("its pattern may change (RigL" in note for note in traced.report.notes) == 2


FORMATS = pytest.mark.parametrize("format", [CSR, CSC], ids=["CSR", "CSC"])


def before_a_change(format, device="cpu"):
    model = network(format).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=device != "cpu")
    rule = RigL(model, optimizer, every=1, end=10)
    for _ in range(2):
        optimizer.zero_grad()
        with rule.watch():
            model(torch.ones(4, 16, device=device)).square().sum().backward()
        if not rule.due:
            rule.update()
            optimizer.step()
    return model, rule


@FORMATS
def test_a_change_to_as_many_entries_reads_nothing(format, monkeypatch):
    """On a CPU, by the way that a GPU takes."""
    model, rule = before_a_change(format)
    old = [model[place].weight.matrix.to_dense() for place in (0, 2)]

    def refuse(*_):
        raise AssertionError("a number was read")

    with monkeypatch.context() as patch:
        patch.setattr(patterns, "spread_lines", lambda pointers, count: searched_lines(pointers, 0, count))
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique", "cpu"):
            patch.setattr(torch.Tensor, name, refuse)
        patch.setattr(torch, "equal", refuse)
        assert rule.update()
    assert all((model[place].weight.matrix.to_dense() != one).any() for place, one in zip((0, 2), old, strict=True))
    x = torch.randn(3, 16, requires_grad=True)
    model(x).sum().backward()  # through the transposed arrays
    dense = copy.deepcopy(model)
    dense[0], dense[2] = (nn.Linear(16, 32), nn.Linear(32, 8))
    for place in (0, 2):
        dense[place].weight.data, dense[place].bias = model[place].weight.matrix.to_dense().detach(), model[place].bias
    (expected,) = torch.autograd.grad(dense(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@FORMATS
def test_a_change_does_not_wait_for_the_gpu(format):
    _, rule = before_a_change(format, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert rule.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("spare", [0, 3])
def test_rows_of_entries_with_some_around_them(first, spare):
    pointers = torch.tensor([0, 2, 2, 5, 6]) + first
    for found in (spread_lines(pointers, 6 + first + spare), searched_lines(pointers, 0, 6 + first + spare)):
        assert found[first : first + 6].tolist() == [0, 0, 2, 2, 2, 3]
        assert found.numel() == 6 + first + spare and found.min() >= 0 and found.max() <= 3
