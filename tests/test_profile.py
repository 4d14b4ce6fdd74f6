"""profile: counts are exact, times are plausible, the model is left alone."""

import json

import pytest
import torch
from rewriting import AttributeLIF, ConvNet
from torch import nn

import sparsecomp
from sparsecomp._profile import block_size


def test_density_and_empty_blocks_are_exact():
    model = nn.Sequential(nn.Identity(), nn.Conv2d(2, 4, 1))
    x = torch.zeros(1, 2, 14, 14)
    x[0, :, 0, 0] = 1
    x[0, 1, 13, 13] = torch.nan
    layer = sparsecomp.profile(model, x, repetitions=2).layers[1]
    assert (layer.name, layer.kind, layer.calls) == ("1", "Conv2d", 1)
    assert layer.density == pytest.approx(3 / (2 * 14 * 14))
    assert (layer.block, layer.empty_blocks) == (8, 0.5)
    assert layer.milliseconds > 0
    assert layer.samples_per_second == pytest.approx(1e3 / layer.milliseconds)


@pytest.mark.parametrize(("height", "block"), [(224, 16), (56, 16), (55, 8), (14, 8), (13, 4), (8, 4), (7, None)])
def test_the_block_rule(height, block):
    assert block_size(height) == block


def test_calls_add_up_and_the_state_stays():
    model = ConvNet().eval()
    model.second = nn.Sequential(model.second)
    result = sparsecomp.profile(model, torch.rand(2, 3, 8, 8), repetitions=1)
    assert [layer.name for layer in result.layers] == ["first", "norm", "fire1", "second.0", "fire2", "head"]
    assert all(module.v is None for module in model.modules() if isinstance(module, AttributeLIF))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_json_and_table():
    result = sparsecomp.profile(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), repetitions=1)
    assert json.loads(result.to_json())["layers"][0]["kind"] == "Linear"
    assert "Linear" in str(result)


def test_no_repetitions_are_refused():
    with pytest.raises(ValueError, match="repetitions=0"):
        sparsecomp.profile(nn.Linear(4, 4), torch.ones(1, 4), repetitions=0)
