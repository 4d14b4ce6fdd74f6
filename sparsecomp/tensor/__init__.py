"""SparseTensor, a matrix that multiplies like a tensor in user code."""
