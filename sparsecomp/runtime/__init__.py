"""The training runtime: prunable layers, masks, schedules, pruners, and the RESU cycle, in plain PyTorch on any device.

    model = sparsecomp.nn.wrap_module(model)
    trainer = RESUTrainer(model, RESUConfig(cycles=5, sparsity_end=0.9), loss_fn, loader, {"lr": 1e-3})
    trainer.fit()
"""

from sparsecomp.runtime.ablation import ablate
from sparsecomp.runtime.adamw import RESUAdamW
from sparsecomp.runtime.budgets import erk_budget, uniform_budget
from sparsecomp.runtime.callbacks import Callback, CheckpointCallback, LogCallback, ProgressCallback
from sparsecomp.runtime.config import RESUConfig
from sparsecomp.runtime.cycle import Phase, RESUCycle
from sparsecomp.runtime.layers import RESUConv2d, RESULinear, RESUMultiheadAttention, masked_weights, wrap_module
from sparsecomp.runtime.mask import SparseMask
from sparsecomp.runtime.masked_weight import MaskedWeight, Mode
from sparsecomp.runtime.optim import RESUSelective, RESUUpdater
from sparsecomp.runtime.resurrection import ResurrectionEmbedding
from sparsecomp.runtime.schedules import amnesty_rate, sparsity_at
from sparsecomp.runtime.selection import select_above, select_top
from sparsecomp.runtime.sparsegpt import sparsegpt
from sparsecomp.runtime.trainer import RESUTrainer

__all__ = [
    "Callback",
    "CheckpointCallback",
    "LogCallback",
    "MaskedWeight",
    "Mode",
    "Phase",
    "ProgressCallback",
    "RESUAdamW",
    "RESUConfig",
    "RESUConv2d",
    "RESUCycle",
    "RESULinear",
    "RESUMultiheadAttention",
    "RESUSelective",
    "RESUTrainer",
    "RESUUpdater",
    "ResurrectionEmbedding",
    "SparseMask",
    "ablate",
    "amnesty_rate",
    "erk_budget",
    "masked_weights",
    "select_above",
    "select_top",
    "sparsegpt",
    "sparsity_at",
    "uniform_budget",
    "wrap_module",
]
