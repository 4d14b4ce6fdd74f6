"""Which weights to keep, by magnitude or by Wanda (Sun et al. 2023).

A weight is a linear layer's (rows, fan_in) or a convolution's (K, C, R, S).
"""

import torch
from torch.nn import functional

from sparsecomp.errors import MaskError
from sparsecomp.reference.selection import select_top


def magnitude_mask(weight: torch.Tensor, keep: int) -> torch.Tensor:
    """True at the `keep` largest |w| of the layer, ties to the lowest index; MaskError on NaN or a bad count."""
    return select_top(weight.detach().float().abs().reshape(-1), keep, refuse_nan=True).reshape(weight.shape)


def wanda_scores(weight: torch.Tensor, input_norm: torch.Tensor) -> torch.Tensor:
    """|W_ij| * ||X_j||_2 in fp32, of the weight's shape.

    `input_norm` has fan_in elements: the norm of each input over all tokens, padding left out (`input_norms` for
    a linear layer, on `unfolded` for a convolution). MaskError if it has another size.
    """
    flat = weight.detach().float().reshape(weight.shape[0], weight.shape[1:].numel())
    if input_norm.shape != flat.shape[1:]:
        raise MaskError(f"{tuple(input_norm.shape)} input norms for a fan-in of {flat.shape[1]}: give one an input")
    return (flat.abs() * input_norm.float()).reshape(weight.shape)


def input_norms(tokens: torch.Tensor) -> torch.Tensor:
    """The 2-norm of each input over all tokens, fp32 of shape (fan_in,); `tokens` is (..., fan_in)."""
    return tokens.detach().float().reshape(-1, tokens.shape[-1]).norm(dim=0)


def unfolded(images: torch.Tensor, convolution: torch.nn.Conv2d) -> torch.Tensor:
    """The convolution's input patches as tokens, (N * positions, C * R * S); groups and non-zero padding: MaskError."""
    if convolution.groups != 1 or convolution.padding_mode != "zeros" or isinstance(convolution.padding, str):
        raise MaskError("scores by unfold need groups=1 and numeric zero padding: prune this layer by magnitude")
    patches = functional.unfold(
        images, convolution.weight.shape[-2:], convolution.dilation, convolution.padding, convolution.stride
    )
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])


def rowwise_mask(scores: torch.Tensor, sparsity: float) -> torch.Tensor:
    """Keep the best of each output row, bool of the scores' shape; a row drops int(fan_in * sparsity) elements.

    MaskError on NaN or a sparsity outside [0, 1).
    """
    if not 0 <= sparsity < 1:
        raise MaskError(f"the sparsity is {sparsity}: it lies in [0, 1)")
    rows = scores.reshape(scores.shape[0], scores.shape[1:].numel())
    return select_top(rows, rows.shape[1] - int(rows.shape[1] * sparsity), refuse_nan=True).reshape(scores.shape)


def n_of_m_mask(scores: torch.Tensor, keep: int, group: int, refuse_nan: bool = True) -> torch.Tensor:
    """Keep `keep` of each `group` neighbours along the input channels (dimension 1); bool of the scores' shape.

    MaskError on NaN, unless it may rank last, or if the group does not divide the input channels.
    """
    if group < 1 or scores.shape[1] % group:
        raise MaskError(f"groups of {group} do not divide {scores.shape[1]} input channels: leave this layer dense")
    last = scores.movedim(1, -1)
    kept = select_top(last.reshape(-1, group), keep, refuse_nan)
    return kept.reshape(last.shape).movedim(-1, 1).contiguous()
