"""The training runtime: prunable layers, masks, schedules, pruners, and the RESU cycle, in plain PyTorch on any device.

    model = sparsecomp.nn.wrap_module(model)
    trainer = RESUTrainer(model, RESUConfig(cycles=5, sparsity_end=0.9), loss_fn, loader, {"lr": 1e-3})
    trainer.fit()
"""

from sparsecomp.nn import RESUConv2d, RESULinear, RESUMultiheadAttention, masked_weights, wrap_module
from sparsecomp.nn.masked.mask import SparseMask
from sparsecomp.nn.masked.masked_weight import MaskedWeight, Mode
from sparsecomp.reference.selection import select_above, select_top
from sparsecomp.training.dynamic.delta import PatternDelta
from sparsecomp.training.dynamic.dynamic_sparsity import DynamicSparsity
from sparsecomp.training.dynamic.gradients import GradientAccumulator
from sparsecomp.training.dynamic.gradual import GradualPruning
from sparsecomp.training.dynamic.manager import PatternChange, PatternManager
from sparsecomp.training.dynamic.random_growth import RandomGrowth
from sparsecomp.training.dynamic.rigl import RigL
from sparsecomp.training.dynamic.set import SET
from sparsecomp.training.dynamic.srigl import SRigL
from sparsecomp.training.dynamic.straight_through import sr_ste, top_kast
from sparsecomp.training.loop.callbacks import Callback, CheckpointCallback, LogCallback, ProgressCallback
from sparsecomp.training.loop.resu_trainer import RESUTrainer
from sparsecomp.training.loop.trainer import Trainer
from sparsecomp.training.proximal.penalties import L1, GroupLasso, Hoyer, Penalty
from sparsecomp.training.proximal.proximal import Proximal
from sparsecomp.training.pruning.budgets import erk_budget, uniform_budget
from sparsecomp.training.pruning.sparsegpt import sparsegpt
from sparsecomp.training.resu.ablation import ablate
from sparsecomp.training.resu.adamw import RESUAdamW
from sparsecomp.training.resu.config import RESUConfig
from sparsecomp.training.resu.cycle import Phase, RESUCycle
from sparsecomp.training.resu.optim import RESUSelective
from sparsecomp.training.resu.resurrection import ResurrectionEmbedding, RESUUpdater
from sparsecomp.training.schedules import amnesty_rate, sparsity_at

__all__ = [
    "L1",
    "SET",
    "Callback",
    "CheckpointCallback",
    "DynamicSparsity",
    "GradientAccumulator",
    "GradualPruning",
    "GroupLasso",
    "Hoyer",
    "LogCallback",
    "MaskedWeight",
    "Mode",
    "PatternChange",
    "PatternDelta",
    "PatternManager",
    "Penalty",
    "Phase",
    "ProgressCallback",
    "Proximal",
    "RESUAdamW",
    "RESUConfig",
    "RESUConv2d",
    "RESUCycle",
    "RESULinear",
    "RESUMultiheadAttention",
    "RESUSelective",
    "RESUTrainer",
    "RESUUpdater",
    "RandomGrowth",
    "ResurrectionEmbedding",
    "RigL",
    "SRigL",
    "SparseMask",
    "Trainer",
    "ablate",
    "amnesty_rate",
    "erk_budget",
    "masked_weights",
    "select_above",
    "select_top",
    "sparsegpt",
    "sparsity_at",
    "sr_ste",
    "top_kast",
    "uniform_budget",
    "wrap_module",
]
