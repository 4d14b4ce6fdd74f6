"""Attention by a pattern whose projections are pruned and resurrected."""

from sparsecomp.nn.attention.multihead import SparseMultiheadAttention
from sparsecomp.nn.masked.attention import RESUMultiheadAttention


class RESUSparseMultiheadAttention(RESUMultiheadAttention, SparseMultiheadAttention):
    """`SparseMultiheadAttention` whose projections can be pruned and resurrected; takes the same arguments.

    What is pruned is a weight of a projection; which pairs attend to one another is the pattern's, as before.

    Attributes:
        masked: by the parameter's name, with `out_proj` for the output projection.
    """
