"""Blocks and networks on grids, their settings, and the formulas of their sizes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsecomp.errors import CheckpointError, ConfigError, FormatError
from sparsecomp.nn import (
    GeoSparseConfig,
    GeoSparseNet,
    GeoSparseResidualBlock,
    adopt_patterns,
    build_geo_connectivity,
    count_params,
    dense_mlp_params,
    geo_sparse_block_params,
    geo_sparse_net_params,
    match_dense,
    match_dense_width,
    sparse_linear_params,
)


def net_of(seed: int = 0, input_dim: int = 16, **settings: Any) -> GeoSparseNet:
    torch.manual_seed(0)
    return GeoSparseNet(input_dim, 3, **{"shape": (4, 4), "depth": 2, "k": 4, "seed": seed} | settings)


def test_a_block_is_what_it_says():
    index = build_geo_connectivity((4, 4), k=4)
    block = GeoSparseResidualBlock(16, index, activation_type="tanh", residual_alpha_init=0.5).double()
    x = torch.randn(5, 16, dtype=torch.float64)
    dense = [
        torch.zeros(16, 16, dtype=torch.float64).scatter_add(1, index.long(), layer.weight.detach())
        for layer in (block.fc1, block.fc2)
    ]
    normed = x * (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt()
    hidden = F.linear(normed, dense[0], block.fc1.bias).tanh()
    torch.testing.assert_close(block(x), x + 0.5 * F.linear(hidden, dense[1], block.fc2.bias))


def test_a_start_at_zero_gives_no_first_gradient_and_the_default_does():
    index = build_geo_connectivity((4, 4), k=4)
    for settings, moves in (({}, True), ({"residual_alpha_init": 0.0}, False)):
        block = GeoSparseResidualBlock(16, index, **settings)
        block(torch.randn(5, 16)).square().sum().backward()
        assert bool(block.fc1.weight.grad.any()) is moves
        assert block.alpha.grad.item() != 0


def test_drop_path_leaves_samples_out_and_keeps_the_mean():
    net = net_of(depth=3, drop_path_max=0.5)
    assert [block.drop_path.probability for block in net.blocks] == [0.0, 0.25, 0.5]
    torch.manual_seed(0)
    drop = net.blocks[2].drop_path
    out = drop(torch.ones(4000, 2, 3))
    assert set(out.unique().tolist()) == {0.0, 2.0} and torch.equal(out, out[:, :1, :1].expand_as(out))
    assert abs(out.mean() - 1) < 5 * (0.25 / 4000) ** 0.5 * 2
    assert torch.equal(drop.eval()(out), out)


def test_grids_are_resampled_by_means():
    net = net_of(shape=[(4, 4), (2, 2), (4, 2)], depth=3, k=2)
    x = torch.arange(16.0)
    assert net.resample[1](x).tolist() == [2.5, 4.5, 10.5, 12.5]
    assert net.resample[2](torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 2, 1, 2, 3, 4, 3, 4]
    for rows in ((), (0,), (1,), (2, 3)):
        assert net(torch.randn(*rows, 16)).shape == (*rows, 3)
    with pytest.raises(FormatError, match=r"needs \(..., 16\)"):
        net(torch.randn(2, 15))


@pytest.mark.slow(reason="compiles")
def test_a_compiled_network_trains_as_an_eager_one():
    torch.compiler.reset()
    net = net_of(depth=1, activation_type="phase_psann")
    other, x, y = copy.deepcopy(net), torch.randn(64, 16), torch.randn(64, 3)
    losses = []
    for model in (net, other):
        call = torch.compile(model, backend="sparsecomp") if model is net else model
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(20):
            loss = F.mse_loss(call(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] < F.mse_loss(torch.zeros_like(y), y)


def test_checkpoints_of_another_seed():
    net, other = (net_of(seed, pattern="random", radius=2) for seed in (0, 1))
    x = torch.randn(5, 16)
    assert not torch.equal(net.blocks[0].fc1.in_index_per_out, net.blocks[1].fc1.in_index_per_out)
    before = copy.deepcopy(other.state_dict())
    with torch.no_grad():
        net.blocks[0].alpha.fill_(0.5)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.fc1\.in_index_per_out.*another seed"):
        other.load_state_dict(net.state_dict())
    assert all(map(torch.equal, before.values(), other.state_dict().values()))
    adopt_patterns(other)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), net(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": (4,)}, "shape is"),
        ({"shape": [(4, 4), (4, 4), (4, 4)]}, "shape has 3 grids, depth is 2"),
        ({"depth": 0}, "depth is 0"),
        ({"k": 10}, "at most 9 candidates"),
        ({"norm": "batch"}, "needs one of rms, layer, none"),
        ({"compute_mode": "dense"}, "needs one of compiled"),
        ({"activation_type": "sine"}, "needs one of relu"),
        ({"activation_config": {"amplitud": 1}}, "'amplitud'"),
        ({"drop_path_max": 1.0}, "drop_path_max is 1.0"),
        ({"residual_alpha_init": float("nan")}, "residual_alpha_init is nan"),
        ({"input_shape": (5, 5)}, "H · W must be input_dim"),
        ({"fan_in": 4}, "unexpected keyword argument 'fan_in'; its settings are shape, depth"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        net_of(**settings)


def test_a_config_is_the_keywords():
    config = GeoSparseConfig(shape=(4, 4), depth=2, k=4, seed=0)
    torch.manual_seed(0)
    net = GeoSparseNet(16, 3, config)
    assert net.config == net_of().config
    assert all(map(torch.equal, net.state_dict().values(), net_of().state_dict().values()))
    with pytest.raises(ConfigError, match="config and k are given"):
        GeoSparseNet(16, 3, config, k=3)
    with pytest.raises(ConfigError, match="missing a required argument: 'shape'"):
        GeoSparseNet(16, 3)


SETTINGS = [
    {}, {"bias": False}, {"norm": "layer"}, {"norm": "none"}, {"activation_type": "relu"}, {"input_dim": 10},
    {"activation_type": "phase_psann"}, {"shape": [(4, 4), (3, 5)]}, {"input_shape": (2, 5), "input_dim": 10},
    {"activation_config": {"learnable": ("amp",)}}, {"activation_config": {"trainable": ()}},
    {"activation_type": "phase_psann", "activation_config": {"phase_trainable": False}},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_formulas_are_the_counts(settings):
    net = net_of(**settings)
    given = {"shape": (4, 4), "depth": 2, "k": 4} | settings
    wanted = sum(one.numel() for one in net.parameters())
    assert geo_sparse_net_params(output_dim=3, **given) == count_params(net) == wanted
    kept = {key: value for key, value in settings.items() if key in ("bias", "norm")}
    kept |= {key: value for key, value in settings.items() if key.startswith("activation")}
    block = net.blocks[0]
    assert geo_sparse_block_params(16, 4, **kept) == sum(one.numel() for one in block.parameters())
    assert sparse_linear_params(16, 4, bias=kept.get("bias", True)) == sum(
        one.numel() for one in block.fc1.parameters()
    )


def mlp(width: int, depth: int, bias: bool = True) -> nn.Module:
    sizes = [7, *[width] * depth, 2]
    return nn.Sequential(*(nn.Linear(*sizes[place : place + 2], bias=bias) for place in range(depth + 1)))


def test_the_dense_network_that_matches():
    for bias in (True, False):
        for width, depth in ((1, 1), (13, 1), (13, 3), (200, 2)):
            target = sum(one.numel() for one in mlp(width, depth, bias).parameters())
            sizes = {"input_dim": 7, "output_dim": 2, "bias": bias}
            assert dense_mlp_params(hidden_dim=width, depth=depth, **sizes) == target
            assert match_dense_width(target_params=target, depth=depth, **sizes) == (width, 0)
            # between two widths the nearer one
            failing = {one: abs(dense_mlp_params(hidden_dim=one, depth=depth, **sizes) - 999) for one in range(1, 300)}
            nearest = min(failing, key=lambda one: failing[one])
            assert match_dense_width(target_params=999, depth=depth, **sizes) == (nearest, failing[nearest])
    found = match_dense(50_000, 7, 2)
    assert found.matches and found.mismatch <= 0.01
    assert found.parameters == sum(one.numel() for one in mlp(found.width, found.depth).parameters())
    none = match_dense(5, 7, 2)
    assert not none.matches and str(none).startswith("no match; the nearest: 1 hidden layers of 1, 12 parameters")
    with pytest.raises(ConfigError, match="target_params is 0"):
        match_dense(0, 7, 2)
