"""How torch's layers map to its operators, and where their arguments are."""

from collections.abc import Callable
from typing import Any

from torch import nn


def _from_attributes(*names: str) -> Callable[[Any, nn.Module], dict[str, Any]]:
    """Reads an operator's arguments from the attributes of the layer that calls it."""

    def read(value: Any, module: nn.Module) -> dict[str, Any]:
        return {"input": value, **{name: getattr(module, name) for name in names}}

    return read


def _dropout(value: Any, module: nn.Module) -> dict[str, Any]:
    return {"input": value, "p": module.p, "training": module.training, "inplace": module.inplace}


def _batch_norm(value: Any, module: nn.Module) -> dict[str, Any]:
    use_batch = module.training or (module.running_mean is None and module.running_var is None)
    names = ("running_mean", "running_var", "weight", "bias", "momentum", "eps")
    return {"input": value, **{name: getattr(module, name) for name in names}, "training": use_batch}


def _upsample(value: Any, module: nn.Module) -> dict[str, Any]:
    names = ("size", "scale_factor", "mode", "align_corners")
    return {"input": value, **{name: getattr(module, name) for name in names}}


def _padding(value: Any, module: nn.Module) -> dict[str, Any]:
    return {"input": value, "pad": module.padding, "mode": "constant", "value": getattr(module, "value", 0.0)}


def _unflatten(value: Any, module: nn.Module) -> dict[str, Any]:
    return {"input": value, "dim": module.dim, "sizes": module.unflattened_size}


_conv = _from_attributes("weight", "bias", "stride", "padding", "dilation", "groups", "padding_mode")
_conv_transpose = _from_attributes(
    "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation", "padding_mode"
)
_max_pool = _from_attributes("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_avg_pool = _from_attributes("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_avg_pool1d = _from_attributes("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_output_size = _from_attributes("output_size")
_max_output_size = _from_attributes("output_size", "return_indices")
_plain = _from_attributes()
_inplace = _from_attributes("inplace")

MODULE_OPS: dict[type[nn.Module], tuple[str, Callable[[Any, nn.Module], dict[str, Any]]]] = {
    nn.Conv1d: ("conv1d", _conv),
    nn.Conv2d: ("conv2d", _conv),
    nn.Conv3d: ("conv3d", _conv),
    nn.ConvTranspose1d: ("conv_transpose1d", _conv_transpose),
    nn.ConvTranspose2d: ("conv_transpose2d", _conv_transpose),
    nn.ConvTranspose3d: ("conv_transpose3d", _conv_transpose),
    nn.Linear: ("linear", _from_attributes("weight", "bias")),
    nn.BatchNorm1d: ("batch_norm", _batch_norm),
    nn.BatchNorm2d: ("batch_norm", _batch_norm),
    nn.BatchNorm3d: ("batch_norm", _batch_norm),
    nn.LayerNorm: ("layer_norm", _from_attributes("normalized_shape", "weight", "bias", "eps")),
    nn.GroupNorm: ("group_norm", _from_attributes("num_groups", "weight", "bias", "eps")),
    nn.MaxPool1d: ("max_pool1d", _max_pool),
    nn.MaxPool2d: ("max_pool2d", _max_pool),
    nn.MaxPool3d: ("max_pool3d", _max_pool),
    nn.AdaptiveMaxPool1d: ("adaptive_max_pool1d", _max_output_size),
    nn.AdaptiveMaxPool2d: ("adaptive_max_pool2d", _max_output_size),
    nn.AvgPool1d: ("avg_pool1d", _avg_pool1d),
    nn.AvgPool2d: ("avg_pool2d", _avg_pool),
    nn.AvgPool3d: ("avg_pool3d", _avg_pool),
    nn.AdaptiveAvgPool1d: ("adaptive_avg_pool1d", _output_size),
    nn.AdaptiveAvgPool2d: ("adaptive_avg_pool2d", _output_size),
    nn.AdaptiveAvgPool3d: ("adaptive_avg_pool3d", _output_size),
    nn.Dropout: ("dropout", _dropout),
    nn.Dropout1d: ("dropout1d", _dropout),
    nn.Dropout2d: ("dropout2d", _dropout),
    nn.Dropout3d: ("dropout3d", _dropout),
    nn.AlphaDropout: ("alpha_dropout", _dropout),
    nn.FeatureAlphaDropout: ("feature_alpha_dropout", _dropout),
    nn.ReLU: ("relu", _inplace),
    nn.ReLU6: ("relu6", _inplace),
    nn.LeakyReLU: ("leaky_relu", _from_attributes("negative_slope", "inplace")),
    nn.GELU: ("gelu", _plain),
    nn.SiLU: ("silu", _inplace),
    nn.Sigmoid: ("sigmoid", _plain),
    nn.Tanh: ("tanh", _plain),
    nn.Softmax: ("softmax", _from_attributes("dim")),
    nn.Identity: ("identity", _plain),
    nn.Flatten: ("flatten", _from_attributes("start_dim", "end_dim")),
    nn.Unflatten: ("unflatten", _unflatten),
    nn.Upsample: ("interpolate", _upsample),
    nn.ZeroPad2d: ("pad", _padding),
    nn.ConstantPad2d: ("pad", _padding),
}
"""Exact layer types; a subclass may compute anything and is not in the table."""
