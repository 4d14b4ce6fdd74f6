"""An attention with a mask, in whatever way it is written."""

from torch import fx

from sparsecomp.passes.attention.sdpa import sdpa_site
from sparsecomp.passes.attention.site import AttentionSite
from sparsecomp.passes.attention.written import written_site
from sparsecomp.passes.engine.rule import Refusal
from sparsecomp.passes.graph.canonicalize import op_of


def site_at(node: fx.Node) -> AttentionSite | Refusal | None:
    """The attention whose last call a node is; None if it is none with a mask."""
    op = op_of(node)
    if op is None or op.module is not None or op.out is not None:
        return None
    return sdpa_site(op) if op.name == "scaled_dot_product_attention" else written_site(op)
