"""Whoever knows psann finds the same names, settings and numbers; its public interface is the independent source."""

import inspect
from dataclasses import fields

import pytest
import torch

psann = pytest.importorskip("psann")
from psann import activations, nn_geo_sparse  # noqa: E402
from psann.layers import geo_sparse  # noqa: E402

from sparsecomp import nn  # noqa: E402


def keywords(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_names_and_settings():
    assert keywords(geo_sparse.build_geo_connectivity) <= keywords(nn.build_geo_connectivity)
    assert keywords(geo_sparse.GeoSparseLinear) <= keywords(nn.GeoSparseLinear)
    assert keywords(nn_geo_sparse.GeoSparseResidualBlock) <= keywords(nn.GeoSparseResidualBlock)
    settings = {"input_dim", "output_dim", *(one.name for one in fields(nn.GeoSparseConfig))}
    assert keywords(nn_geo_sparse.GeoSparseNet) <= settings
    for name in ("count_params", "dense_mlp_params"):
        assert keywords(getattr(psann, name)) <= keywords(getattr(nn, name))
    assert keywords(nn_geo_sparse.GeoSparseNet) & keywords(psann.GeoSparseRegressor) <= keywords(nn.GeoSparseRegressor)


@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_the_layer(mode):
    index = nn.build_geo_connectivity((6, 7), k=5, radius=2)
    theirs = geo_sparse.GeoSparseLinear(42, 42, index.long(), compute_mode=mode)
    ours = nn.GeoSparseLinear(42, 42, index)
    ours.load_state_dict({name: value for name, value in theirs.state_dict().items() if name in ours.state_dict()})
    x = torch.randn(9, 42, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x))
    grads = [torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias)) for layer in (ours, theirs)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("wrap_mode", ["clamp", "wrap"])
def test_a_whole_neighbourhood(wrap_mode):
    theirs = geo_sparse.build_geo_connectivity((6, 7), k=9, wrap_mode=wrap_mode).tolist()
    ours = nn.build_geo_connectivity((6, 7), k=9, wrap_mode=wrap_mode).tolist()
    assert [set(one) for one in ours] == [set(one) for one in theirs]


@pytest.mark.parametrize("mode", ["abs", "relu", "none"])
def test_the_sines(mode):
    z = torch.linspace(-5, 5, 12).view(4, 3)
    given = {"amplitude_init": 1.5, "frequency_init": 2.0, "decay_init": 0.3, "decay_mode": mode}
    torch.testing.assert_close(nn.SineParam(3, **given)(z), activations.SineParam(3, **given)(z))
    torch.testing.assert_close(
        nn.PhaseSineParam(3, phase_init=0.4, **given)(z), activations.PhaseSineParam(3, phase_init=0.4, **given)(z)
    )


def test_the_dense_width_and_the_counts():
    sizes = {"input_dim": 3, "output_dim": 2, "depth": 2}
    for target in (100, 1000, 54321):
        assert nn.match_dense_width(target_params=target, **sizes)[1] == psann.match_dense_width(
            target_params=target, **sizes
        )[1]
    settings = {"shape": (4, 4), "depth": 2, "k": 4}
    for more in ({}, {"activation_type": "phase_psann", "norm": "layer"}, {"activation_type": "relu", "bias": False}):
        theirs = nn_geo_sparse.GeoSparseNet(16, 3, **settings, **more)
        assert nn.geo_sparse_net_params(output_dim=3, **settings, **more) == psann.count_params(theirs)
