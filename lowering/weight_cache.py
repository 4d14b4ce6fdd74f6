"""Forms of a weight that kernels want, made once and kept until the weight is written to or replaced."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def kept(weight: Tensor, form: Hashable, make: Callable[[], Any]) -> Any:
    """``make()``, remembered for this weight and ``form`` between eager calls.

    Inside a CUDA graph capture nothing is kept: the making is captured too, so a replay sees the weight's new values.
    """
    if weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    stamp = (weight._version, weight.data_ptr())
    if weight.is_cuda:
        # made on one stream, it may not be ready on another
        form = (form, torch.cuda.current_stream(weight.device).cuda_stream)
    forms = _kept.get(weight)
    if forms is None or forms[0] != stamp:
        forms = (stamp, {})
        _kept[weight] = forms
    made = forms[1].get(form)
    if made is None:
        with torch.no_grad():
            made = forms[1][form] = make()
    return made
