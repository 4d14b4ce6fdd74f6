"""Where checkpoints of version 0.1 look for the rebuilding of a SparseTensor."""

from sparsecomp.tensor.sparse_tensor import rebuild

__all__ = ["rebuild"]
