"""A linear layer with a sparse weight."""

from typing import Any, Self, cast

from torch import Tensor, fx, nn

from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR, SparseMatrix
from sparsecomp.nn.masked.existing_mask import bias_of, is_trained
from sparsecomp.nn.sparse.pruning import pruned_layer
from sparsecomp.nn.sparse.stored_weight import StoredWeight
from sparsecomp.ops.sparse.linear import LINEAR, autocast, no_tensor
from sparsecomp.tensor.sparse_tensor import SparseTensor


class SparseLinear(StoredWeight):
    """y = x @ weight.T + bias.

    Args:
        weight: (out_features, in_features), a matrix of `sparsecomp.formats` or a SparseTensor.
        bias: (out_features,), or None.
        requires_grad: whether the weight's values take a gradient.

    Raises:
        FormatError: the weight is a batch or no sparse matrix, or the bias does not fit it.
    """

    def __init__(
        self, weight: SparseMatrix | SparseTensor, bias: Tensor | None = None, requires_grad: bool = True
    ) -> None:
        super().__init__(weight, requires_grad)
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != self.shape[:1]):
            given = f"has shape {tuple(bias.shape)}" if isinstance(bias, Tensor) else f"is {bias!r}"
            raise FormatError(f"bias {given}, needs ({self.shape[0]},): a tensor of one number a row, or None for none")
        self.bias = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, format: type[SparseMatrix] = CSR, *, mask: Tensor | None = None,
        sparsity: float | None = None, **layout: Any,
    ) -> Self:  # fmt: skip
        """The layer with part of `linear`'s weight, copied; a bias that is a parameter is shared.

        Args:
            linear: left as it is.
            format: of the weight, with `block=` for BSR and BCSC, `n=` and `m=` for N:M.
            mask: (out_features, in_features): store what is not zero in it. Whole blocks for BSR and BCSC.
            sparsity: share to leave out, the least magnitudes (or block norms) first. Instead of `mask`. Neither means
                the mask that `linear` has, by torch.nn.utils.prune, a parametrization or RESU; without one, for N:M,
                the n largest of each m.

        Raises:
            FormatError: arguments that do not fit.
            MaskError: a weight to be ranked holds NaN, or the layer is in its RESU phase.
        """
        matrix = pruned_layer(linear, nn.Linear, format, mask, sparsity, layout)
        return cls(matrix, bias_of(linear), is_trained(linear)).train(linear.training)

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.shape[1]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) to (…, out_features).

        What is not stored is not multiplied: NaN or infinity in a feature reaches only the rows that store something
        there. A compiled layer that the report calls dense promises that for finite inputs only, unless
        precision='exact' is asked for.
        """
        if not isinstance(x, Tensor):
            return self._of_no_tensor(x)
        return self._product(x, self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # the operator itself: before each call Dynamo asks for whatever this reads, and for defaults of a function's
        # keywords it takes as long as for a layer
        x, values = autocast(x, self._live())
        return LINEAR(x, values, self._pattern(), bias, None, self._written, self._by_columns, "none", "")

    def _of_no_tensor(self, x: object) -> Tensor:
        if isinstance(x, fx.Proxy):
            return cast(Tensor, self._as_node(x))
        raise no_tensor(x, self.values)

    def extra_repr(self) -> str:
        """Sizes and format, for print."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, format={self.format}"
