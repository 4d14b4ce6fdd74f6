"""Normalisations shift and scale: they end every domain, zeros included."""

from sparsecomp.passes.facts.registry import Facts, Lost, LostKind, Result, transfer
from sparsecomp.passes.graph.canonicalize import CanonicalOp


@transfer("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm")
def normalise(op: CanonicalOp, facts: Facts) -> Result:
    """Even an all-zero region becomes the shift's constant."""
    return Lost(LostKind.SHIFTS, f"{op.name} ends the domain: it shifts and scales")
