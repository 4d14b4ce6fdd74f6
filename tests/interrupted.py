"""A training that is saved and goes on in fresh objects, as after an interruption."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import sparsecomp


def gone_on(
    model: nn.Module, optimizer: Optimizer, rule: Any, fresh: nn.Module, rule_of: Callable[[nn.Module, Optimizer], Any]
) -> tuple[nn.Module, Optimizer, Any]:
    """The fresh model with what was saved, an AdamW of it likewise, and then the rule that `rule_of` makes of both."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), rule.state_dict()))
    sparsecomp.load_state_dict(fresh, saved[0])
    again = torch.optim.AdamW(fresh.parameters(), lr=optimizer.defaults["lr"])
    again.load_state_dict(saved[1])
    other = rule_of(fresh, again)
    other.load_state_dict(saved[2])
    return fresh, again, other
