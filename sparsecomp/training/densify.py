"""The way out: sparse and resurrectable layers become torch's own again, with torch's keys in their state."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from sparsecomp.errors import FormatError, MaskError
from sparsecomp.nn.attention.multihead import SparseMultiheadAttention
from sparsecomp.nn.masked.existing_mask import bias_of, is_trained
from sparsecomp.nn.masked.layers import RESUConv2d, RESULinear, RESUMultiheadAttention
from sparsecomp.nn.masked.masked_weight import Mode
from sparsecomp.nn.masked.sparse_attention import RESUSparseMultiheadAttention
from sparsecomp.nn.sparse.embedding import SparseEmbedding
from sparsecomp.nn.sparse.linear import SparseLinear
from sparsecomp.nn.sparse.stored_weight import StoredWeight
from sparsecomp.training.replacement import check_model, end_pruning, obstacle, refresh_pruned, replace_layers, told


def densify(model: nn.Module) -> nn.Module:
    """Replace a model's sparse and RESU layers by torch's own, in place, and end torch's pruning of the others.

    What was pruned is zero in the dense weights. Parameters of RESU layers and all biases stay the same objects, so
    that optimizers stay valid; the weights of sparse layers are new parameters. Hooks around forward and backward and
    what was added to a layer (attributes, parameters, buffers, modules) go over to its replacement; a layer of which
    something would be lost, such as a forward of its own, stays, and a warning says why.

    Args:
        model: with layers of `sparsecomp.nn`, or such as `torch.nn.utils.prune` masks.

    Returns:
        The model, or its replacement where it is itself such a layer; its `state_dict` has the keys of the plain model.

    Raises:
        InputError: `model` is no module.
        MaskError: a layer is in its RESU phase. The model is unchanged.
        FormatError: a sparse layer is on the meta device. The model is unchanged.
    """
    check_model(model)
    modules = dict(model.named_modules())
    layers = {
        name: one for name, one in modules.items() if parametrize.type_before_parametrizations(one) in _PLAIN
    }
    for name, layer in layers.items():
        if getattr(layer, "mode", None) is Mode.RESU:
            raise MaskError(f"{name or 'the layer'} is in its RESU phase: commit it first, by RESUCycle or commit_")
        if isinstance(layer, StoredWeight) and layer.values.is_meta:
            raise FormatError(f"{name or 'the layer'} is on the meta device, which has no numbers: load it elsewhere")
    kept = {name: why for name, layer in layers.items() if (why := obstacle(layer, _kind(layer)))}
    if kept:
        warnings.warn(f"densify leaves layers as they are: {told(kept)}", stacklevel=2)
    with torch.inference_mode(False), torch.no_grad():
        dense = replace_layers(model, {layer: _plain(layer) for name, layer in layers.items() if name not in kept})
        for module in set(dense.modules()) - {layers[name] for name in kept}:
            end_pruning(module)
    return dense


def _kind(layer: nn.Module) -> type[nn.Module]:
    return _PLAIN[parametrize.type_before_parametrizations(layer)][0]


def _plain(layer: nn.Module) -> nn.Module:
    refresh_pruned(layer)
    return _PLAIN[parametrize.type_before_parametrizations(layer)][1](layer)


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
    return _settled(layer, nn.MultiheadAttention(*_of_attention(layer), device="meta"))


def _resu_sparse_attention(layer: RESUSparseMultiheadAttention) -> nn.Module:
    return _settled(layer, SparseMultiheadAttention(layer.pattern, *_of_attention(layer), device="meta"))


def _of_attention(layer: nn.MultiheadAttention) -> tuple[Any, ...]:
    """The arguments that it was made with."""
    return (
        layer.embed_dim, layer.num_heads, layer.dropout, layer.in_proj_bias is not None, layer.bias_k is not None,
        layer.add_zero_attn, layer.kdim, layer.vdim, layer.batch_first,
    )  # fmt: skip


_PLAIN: dict[type[nn.Module], tuple[type[nn.Module], Callable[[Any], nn.Module]]] = {
    SparseLinear: (nn.Linear, _linear),
    SparseEmbedding: (nn.Embedding, _embedding),
    RESULinear: (nn.Linear, _resu_linear),
    RESUConv2d: (nn.Conv2d, _resu_conv2d),
    RESUMultiheadAttention: (nn.MultiheadAttention, _resu_attention),
    RESUSparseMultiheadAttention: (SparseMultiheadAttention, _resu_sparse_attention),
}
"""What each becomes, and how."""
