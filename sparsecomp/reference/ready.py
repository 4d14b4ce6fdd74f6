"""When what one CUDA stream makes may be read on another."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """A point behind all that a stream had been given.

    Attributes:
        stream: the stream's handle.
        event: recorded there; None where nothing has to wait, off CUDA and in a CUDA graph.
    """

    stream: int = 0
    event: torch.cuda.Event | None = None

    @classmethod
    def now(cls, device: torch.device) -> "Ready":
        """The point that the current stream of a device has come to."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return cls()
        stream, event = torch.cuda.current_stream(device), torch.cuda.Event()
        event.record(stream)
        return cls(stream.cuda_stream, event)

    def await_(self, *made: Tensor) -> None:
        """Have the current stream wait before it reads tensors, whose memory stays theirs until it has."""
        if self.event is None:
            return
        stream = torch.cuda.current_stream(made[0].device)
        if stream.cuda_stream != self.stream:
            stream.wait_event(self.event)
            for tensor in made:
                tensor.record_stream(stream)
