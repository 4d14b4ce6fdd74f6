"""Several processes: patterns and masks that are proved equal, and sparse layers that are split.

    agreed(DistributedDataParallel(model))
    parallelize_module(model, mesh, {"up": SparseColwise(), "down": SparseRowwise()})

It loads torch's DTensor, which takes a second, and is therefore loaded with its first use.
"""

from sparsecomp.errors import ReplicaError
from sparsecomp.nn.sparse.split import SparseColwise, SparseRowwise, SplitLinear
from sparsecomp.training.distributed import Replicas, agreed

__all__ = ["ReplicaError", "Replicas", "SparseColwise", "SparseRowwise", "SplitLinear", "agreed"]
