"""The training runtime: masks, sparsity schedules, selection and layer budgets, in plain PyTorch on any device."""

from sparsecomp.runtime.budgets import erk_budget, uniform_budget
from sparsecomp.runtime.mask import SparseMask
from sparsecomp.runtime.schedules import amnesty_rate, sparsity_at
from sparsecomp.runtime.selection import select_above, select_top

__all__ = ["SparseMask", "amnesty_rate", "erk_budget", "select_above", "select_top", "sparsity_at", "uniform_budget"]
