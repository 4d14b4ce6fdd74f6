"""What a graph takes for granted of what an input holds, such as that each row of a mask keeps as many elements.

A constant can be made anew of what an input holds now; a graph that was rewritten because of it cannot. So Dynamo asks
before each call whether it is still so, and compiles anew where it is not. Asking looks at the numbers only where the
input is another tensor or was written to; hidden writes are the promise's, as for constants.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

from torch import Tensor, UntypedStorage, fx

from sparsecomp import _compat

_KEY = "sparsecomp_proofs"
"""Of the graph module's meta, where rules leave what they proved for the backend."""


class Seen(NamedTuple):
    """Where a tensor lay when it was looked at, and how often it had been written to.

    The memory is kept, so that no other tensor can come to lie at its address.
    """

    memory: UntypedStorage
    address: int
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """A tensor as it is now."""
        return cls(tensor.untyped_storage(), tensor.data_ptr(), None if tensor.is_inference() else tensor._version)

    def still(self, tensor: Tensor) -> bool:
        """Whether nothing tells of a write since, or of other memory."""
        # autograd counts no writes to an inference tensor
        return tensor.data_ptr() == self.address and (self.version is None or tensor._version == self.version)


class Assumption:
    """A claim about what a tensor holds, and whether it was true when last looked."""

    def __init__(self, claim: Callable[[Tensor], bool], held: Tensor) -> None:
        self._claim, self._kind = claim, _kind(held)
        self._tensor: Tensor | None = None
        self._seen, self._true = Seen.of(held), True

    def __call__(self, tensor: object) -> bool:
        """Whether it is true of what is now in the tensor's place; waits for the device if that may hold other numbers.

        Dynamo may ask before it looks whether that is such a tensor at all.
        """
        if not isinstance(tensor, Tensor) or _kind(tensor) != self._kind:
            return False
        if tensor is not self._tensor or not self._seen.still(tensor):
            self._true = self._claim(tensor.detach())
            self._tensor, self._seen = tensor, Seen.of(tensor)
        return self._true


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def take_for_granted(like: fx.Node, source: fx.Node, held: Tensor, claim: Callable[[Tensor], bool]) -> None:
    """Have the graph of `like` serve only as long as a claim is true of what an input holds, which it is now.

    Args:
        source, held: the input, and what it holds.
    """
    module = like.graph.owning_module
    assert module is not None
    module.meta.setdefault(_KEY, []).append((source, Assumption(claim, held)))


def assume_proofs(gm: fx.GraphModule) -> set[fx.Node]:
    """Have Dynamo ask for what was proved of the inputs of a graph that it compiles; returns these inputs."""
    proved: list[tuple[fx.Node, Assumption]] = gm.meta.pop(_KEY, [])
    for node, proof in proved:
        _compat.serve_while(node, proof)
    return {node for node, _ in proved}
