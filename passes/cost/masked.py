"""From which size on a masked weight is worth an operator of its own, whose call takes the host longer."""

from sparsecomp.passes.cost.decision import Decision

LEAST_FOLDED = 1 << 17
"""Elements of a weight from which on a fold pays: the call of an operator takes a core 10 to 15 us more than that of
Inductor's kernel, and so does the multiplication of so many elements (torch 2.13, one core)."""
LEAST_MERGED = {"cpu, by a mask": 4 << 20, "cuda": 64 << 20, "cuda, replayed": 2 << 20}
"""Bytes of a weight from which on merging pays. The two operators of a step take the host 0.2 ms more than the kernels
they replace. With 64 MiB an H100 has work for longer: a layer is 1.09 times Inductor, with 32 MiB 0.78; a CUDA graph
needs no host. On a CPU torch scatters by a mask in one thread, a quarter as fast; by positions Inductor is 1.1 to 1.6
times as fast."""


def decide_fold(elements: int) -> Decision:
    """Whether an operator keeps a weight of so many elements: `dense` is to multiply it by its mask in each call."""
    if elements >= LEAST_FOLDED:
        return Decision("folded", "")
    reason = f"its {elements} elements are masked faster than an operator is called"
    return Decision("dense", f"{reason} (from {LEAST_FOLDED} on it is folded)")


def decide_merge(size: int, device: str, by_mask: bool, replayed: bool) -> Decision:
    """Whether an effective weight is computed by an operator in training: `dense` is as it is written.

    Args:
        size: bytes of the weight.
        by_mask: the formula scatters θ by a mask, not by positions.
        replayed: a CUDA graph is replayed.
    """
    kind = device
    if device == "cuda" and replayed:
        kind = "cuda, replayed"
    elif device == "cpu" and by_mask:
        kind = "cpu, by a mask"
    if kind not in LEAST_MERGED:
        return Decision("dense", f"on {kind} Inductor scatters by positions as fast")
    if size < LEAST_MERGED[kind]:
        least = LEAST_MERGED[kind]
        return Decision("dense", f"Inductor trains its {size} bytes as fast (from {least} on they are merged)")
    return Decision("merged", "")
