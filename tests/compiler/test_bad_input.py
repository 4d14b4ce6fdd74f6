"""What eager refuses, the compiled model refuses alike; what breaks inside a rule breaks nothing else."""

import copy

import pytest
import torch
from rewriting import OnSpikes, rewritten
from torch import nn

import sparsecomp
from sparsecomp.errors import RuleError
from sparsecomp.passes import pipeline


def _raised(function, *args) -> str:
    with pytest.raises(Exception) as caught:
        function(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    "x",
    [torch.randn(1, 4, 6, 6).double(), torch.randn(1, 5, 6, 6), torch.randn(1, 4, 6), torch.randn(1, 4, 2, 2)],
    ids=["dtype", "channels", "dimensions", "smaller than the kernel"],
)
def test_inputs_that_eager_refuses(x):
    model = OnSpikes(nn.Conv2d(4, 4, 3))
    eager = _raised(model, x)
    assert eager.split("but got")[0][:40] in _raised(lambda: rewritten(model, x))


def test_inputs_that_eager_refuses_after_a_good_call():
    model = OnSpikes(nn.Conv2d(4, 4, 3))
    compiled = sparsecomp.optimize(model, torch.randn(1, 4, 6, 6), implementation="binary")
    for x in (torch.randn(1, 4, 6, 6).double(), torch.randn(1, 5, 6, 6)):
        assert _raised(compiled, x) == _raised(model, x)


def test_forgetting_to_reset_raises_as_in_eager():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.v = nn.Conv2d(2, 2, 1), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.v = self.conv(x) if self.v is None else self.v * 0.5 + self.conv(x)
            return self.conv((self.v > 0).to(x.dtype)).sum() + self.v.sum()

    x = torch.randn(1, 2, 3, 3)
    model = Recurrent()
    twin = copy.deepcopy(model)
    model(x).backward()
    rewritten(twin, x)[0].backward()
    assert _raised(lambda: model(x).backward())[:50] == _raised(lambda: rewritten(twin, x)[0].backward())[:50]


@pytest.mark.fails_inside
def test_an_analysis_that_fails_leaves_everything_dense(monkeypatch):
    def broken(gm):
        raise ValueError("no facts today")

    monkeypatch.setattr(pipeline, "analyse", broken)
    model, x = OnSpikes(nn.Conv2d(4, 4, 3)), torch.randn(1, 4, 6, 6)
    found, report = rewritten(model, x)
    torch.testing.assert_close(found, model(x))
    assert "no facts today" in report.notes[0]
    torch._dynamo.reset()
    with pytest.raises(RuleError, match="the analysis failed: no facts today"):
        torch.compile(model, backend="sparsecomp", options={"strict": True})(x)
