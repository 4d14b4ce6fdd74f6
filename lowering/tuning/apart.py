"""Work on a GPU whose memory is nobody else's: what tuning allocates belongs to no CUDA graph of the caller.

A graph that is warmed up has what its thread allocates in a pool of its own, which holds on to memory as long as the
graph lives. Tuning allocates many times what a launch does, and so it has a thread of its own.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

import torch

_apart: ContextVar[bool] = ContextVar("sparsecomp_apart", default=False)


def apart(device: torch.device, work: Callable[[], None]) -> None:
    """Do `work` in a thread of its own if it is for a GPU, and give free memory back; wait for it.

    Context variables are the caller's; gradient mode, autocast, device and stream are a new thread's. What work does
    apart is done in its own thread.

    Raises:
        BaseException: what `work` raises.
    """
    if device.type != "cuda" or _apart.get():
        work()
        return
    context = copy_context()
    context.run(_apart.set, True)
    with ThreadPoolExecutor(1, "sparsecomp tuning") as threads:
        threads.submit(context.run, work).result()
    torch.cuda.empty_cache()
