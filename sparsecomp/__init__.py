"""sparsecomp: a sparsity compiler for PyTorch.

    model = torch.compile(model, backend="sparsecomp")
    model = sparsecomp.optimize(model, x)
    print(sparsecomp.explain(model, x))

Names load on first use, so that `import sparsecomp` needs neither Triton nor Inductor and costs next to nothing.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch


class _Beside:
    """Finds the packages that a source tree has beside this one. Were the tree part of `__path__`, this package would
    be within itself, and who walks over all modules would never end."""

    tree = Path(__file__).parents[1]
    names = ("sparsecomp.passes", "sparsecomp.lowering")

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(cls.tree)]) if fullname in cls.names else None


if (_Beside.tree / "passes" / "__init__.py").exists() and (_Beside.tree / "pyproject.toml").exists():
    sys.meta_path.insert(0, _Beside)  # before another tree that is installed

if TYPE_CHECKING:
    from sparsecomp import attention, cache, distributed, formats, nn, ops, passes, runtime, snn
    from sparsecomp.compiler.backend import sparsecomp_backend
    from sparsecomp.compiler.explain import explain
    from sparsecomp.compiler.optimize import optimize
    from sparsecomp.compiler.profile import profile
    from sparsecomp.compiler.warmup import tune
    from sparsecomp.errors import InputError, OptionError, PatternError, RuleError, SparsecompError, SparseOperatorError
    from sparsecomp.nn.loading import load_state_dict
    from sparsecomp.options import Options
    from sparsecomp.report import Report, Site, last_report
    from sparsecomp.snn.registry import register_neuron
    from sparsecomp.tensor.sparse_tensor import SparseTensor
    from sparsecomp.training.densify import densify
    from sparsecomp.training.pruning.layouts import NM, Block, ConstantFanIn, FromMask, Unstructured
    from sparsecomp.training.pruning.pruners import Magnitude, Random, SparseGPT, Wanda
    from sparsecomp.training.sparsify import sparsify

__version__ = "0.2.0"

_HOME = {
    "Block": "training.pruning.layouts",
    "ConstantFanIn": "training.pruning.layouts",
    "FromMask": "training.pruning.layouts",
    "InputError": "errors",
    "Magnitude": "training.pruning.pruners",
    "NM": "training.pruning.layouts",
    "OptionError": "errors",
    "Options": "options",
    "PatternError": "errors",
    "Random": "training.pruning.pruners",
    "Report": "report",
    "RuleError": "errors",
    "Site": "report",
    "SparseGPT": "training.pruning.pruners",
    "SparseOperatorError": "errors",
    "SparseTensor": "tensor.sparse_tensor",
    "SparsecompError": "errors",
    "Unstructured": "training.pruning.layouts",
    "Wanda": "training.pruning.pruners",
    "densify": "training.densify",
    "explain": "compiler.explain",
    "last_report": "report",
    "load_state_dict": "nn.loading",
    "optimize": "compiler.optimize",
    "profile": "compiler.profile",
    "register_neuron": "snn.registry",
    "sparsecomp_backend": "compiler.backend",
    "sparsify": "training.sparsify",
    "tune": "compiler.warmup",
}

_MODULES = ("attention", "cache", "distributed", "formats", "nn", "ops", "passes", "runtime", "snn")

__all__ = [
    "Block",
    "ConstantFanIn",
    "FromMask",
    "InputError",
    "Magnitude",
    "NM",
    "OptionError",
    "Options",
    "PatternError",
    "Random",
    "Report",
    "RuleError",
    "Site",
    "SparseGPT",
    "SparseOperatorError",
    "SparseTensor",
    "SparsecompError",
    "Unstructured",
    "Wanda",
    "attention",
    "cache",
    "densify",
    "distributed",
    "explain",
    "formats",
    "last_report",
    "load_state_dict",
    "nn",
    "ops",
    "optimize",
    "passes",
    "profile",
    "register_neuron",
    "runtime",
    "snn",
    "sparsecomp_backend",
    "sparsify",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"sparsecomp.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'sparsecomp' has no attribute {name!r}")
    value = getattr(import_module(f"sparsecomp.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def _rebuild(*stored: Any) -> Any:
    return import_module("sparsecomp.tensor.sparse_tensor").rebuild(*stored)


# so that torch.load(weights_only=True) reads a SparseTensor, which loads only then
torch.serialization.add_safe_globals([(_rebuild, "sparsecomp.sparse_tensor.rebuild")])


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
