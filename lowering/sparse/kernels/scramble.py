"""Words of 64 bits scrambled, so that sums of them tell contents apart."""

import triton
import triton.language as tl


@triton.jit
def scrambled(word):
    """MurmurHash3's finaliser (A. Appleby, public domain) of an integer, as uint64."""
    word = word.to(tl.uint64)
    word = (word ^ (word >> 33)) * 0xFF51AFD7ED558CCD
    word = (word ^ (word >> 33)) * 0xC4CEB9FE1A85EC53
    return word ^ (word >> 33)
