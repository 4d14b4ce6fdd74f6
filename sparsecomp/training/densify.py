"""The way out: sparse and resurrectable layers become torch's own again, with torch's keys in their state."""

from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.nn.utils import parametrize

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.existing_mask import bias_of, is_trained
from sparsecomp.nn.masked.layers import RESUConv2d, RESULinear, RESUMultiheadAttention
from sparsecomp.nn.masked.masked_weight import Mode
from sparsecomp.nn.sparse.embedding import SparseEmbedding
from sparsecomp.nn.sparse.linear import SparseLinear
from sparsecomp.nn.sparse.stored_weight import StoredWeight
from sparsecomp.training.replacement import refresh_pruned, refuse_hooks, replace_layers


def densify(model: nn.Module) -> nn.Module:
    """Replace a model's sparse and RESU layers by torch's own, in place.

    What was pruned is zero in the dense weights. Parameters of RESU layers and all biases stay the same objects, so
    that optimizers stay valid; the weights of sparse layers are new parameters.

    Args:
        model: with layers of `sparsecomp.nn`; one without any is returned as it is.

    Returns:
        The model, or its replacement where it is itself such a layer; its `state_dict` has the keys of the plain model.

    Raises:
        MaskError: a layer is in its RESU phase, or has hooks that its replacement would lose. The model is unchanged.
    """
    modules = dict(model.named_modules())
    layers = {
        name: one for name, one in modules.items() if parametrize.type_before_parametrizations(one) in _PLAIN
    }
    refuse_hooks(layers)
    for name, layer in layers.items():
        if getattr(layer, "mode", None) is Mode.RESU:
            raise MaskError(f"{name or 'the layer'} is in its RESU phase: commit it first, by RESUCycle or commit_")
    return replace_layers(model, {layer: _plain(layer) for layer in layers.values()})


def _plain(layer: nn.Module) -> nn.Module:
    refresh_pruned(layer)
    plain = _PLAIN[parametrize.type_before_parametrizations(layer)](layer)
    return plain.train(layer.training)


def _linear(layer: SparseLinear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = _dense(layer)
    plain.bias = cast(Any, bias_of(layer))
    return plain


def _embedding(layer: SparseEmbedding) -> nn.Embedding:
    plain = nn.Embedding(*layer.shape, device="meta")
    plain.weight = _dense(layer)
    return plain


def _dense(layer: StoredWeight) -> nn.Parameter:
    return nn.Parameter(layer.weight.detach().to_dense(), is_trained(layer, "values"))


def _settled(layer: Any, plain: nn.Module) -> nn.Module:
    """`plain` with the parameters of a RESU layer, whose pruned elements are zeroed in memory."""
    for weight, masked in layer.masked_weights().values():
        masked.apply_(weight)
    for path, parameter in layer.named_parameters(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        setattr(plain.get_submodule(owner), name, parameter)
    return plain


def _resu_linear(layer: RESULinear) -> nn.Module:
    return _settled(layer, nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta"))


def _resu_conv2d(layer: RESUConv2d) -> nn.Module:
    same: Any = {name: getattr(layer, name) for name in _OF_CONV2D}
    return _settled(layer, nn.Conv2d(**same, bias=layer.bias is not None, device="meta"))


_OF_CONV2D = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"
)  # fmt: skip


def _resu_attention(layer: RESUMultiheadAttention) -> nn.Module:
    plain = nn.MultiheadAttention(
        layer.embed_dim, layer.num_heads, layer.dropout, layer.in_proj_bias is not None, layer.bias_k is not None,
        layer.add_zero_attn, layer.kdim, layer.vdim, layer.batch_first, device="meta",
    )  # fmt: skip
    return _settled(layer, plain)


_PLAIN: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    SparseLinear: _linear,
    SparseEmbedding: _embedding,
    RESULinear: _resu_linear,
    RESUConv2d: _resu_conv2d,
    RESUMultiheadAttention: _resu_attention,
}
