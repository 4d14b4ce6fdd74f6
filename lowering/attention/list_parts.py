"""Which lists of blocks several programs walk over in parts: those of which the longest takes one program longer than
all programs together take over the rest.

By the rows of `bench/results/attention_long.json` (an H200): where the longest list alone takes by estimate as long as
all would if they were even, or longer, parts took 0.32 to 0.77 of the time; where it takes 0.9 of that, 1.14; and where
it takes a tenth, as of causal attention, 1.0 to 1.04. Shorter ones were not measured, and stay whole.
"""

from sparsecomp.lowering.attention.block_attention import BLOCK_ATTENTION
from sparsecomp.lowering.attention.block_attention_gradients import ATTENTION_BY_KEY
from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning import cost
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention.block_attention import OF_KEYS, OF_QUERIES

_AS_LONG = 0.95
"""Share of the time of all lists, if they were even, from which on the longest is walked over in parts."""
_LONG, _BESIDE = 8192, 3
"""Queries or keys of a list that is long, and how often the mean it is."""
LAUNCHES = 3
"""More than without parts."""


def parts_by_estimate(problem: BlockAttention, longest: tuple[int, int], device: Device, card: Card) -> int:
    """The lists of which the long ones are walked over in parts, as of ``Scoring``.

    Args:
        problem: of lists that are even, and as long as they are on the mean (`estimate.even_problem`).
        longest: blocks of the longest list of queries, and of keys.
    """
    p, (of_query, of_key) = problem, longest
    found = 0
    if _is_long(of_query * p.block_k, p.width * p.block_k, p.batch * p.heads * -(-p.q_len // p.block_q), card):
        one = p._replace(batch=1, heads=1, group=1, q_len=min(p.q_len, p.block_q), width=of_query)
        found += OF_QUERIES * _takes_as_long(BLOCK_ATTENTION, one, p, device, card)
    if _is_long(of_key * p.block_q, p.k_width * p.block_q, p.batch * p.heads * -(-p.k_len // p.block_k), card):
        one = p._replace(batch=1, heads=p.group, k_len=min(p.k_len, p.block_k), k_width=of_key)
        found += OF_KEYS * _takes_as_long(ATTENTION_BY_KEY, one, p, device, card)
    return found


def _is_long(longest: int, mean: int, lists: int, card: Card) -> bool:
    """Whether a list is long, beside the rest or for want of lists for all processors."""
    return longest >= _LONG and (longest >= _BESIDE * mean or 2 * lists <= card.processors)


def _takes_as_long(
    operation: Operation[BlockAttention], one: BlockAttention, every: BlockAttention, device: Device, card: Card
) -> bool:
    candidates = operation.candidates(every, device)
    if not candidates:
        return False
    fastest = min(candidates, key=lambda candidate: cost.seconds(candidate, every, card))
    return cost.seconds(fastest, one, card) >= _AS_LONG * cost.seconds(fastest, every, card)
