"""One endless stream of batches with a position, so that a run resumes at the batch after its last."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from sparsecomp.errors import DataError
from sparsecomp.training.loop.random_state import random_state, set_random_state

Data = Iterable[Any] | Callable[[int], Iterable[Any]]


class BatchStream:
    """Batches of `data`, epoch after epoch.

    `data` is a DataLoader or another iterable that can be iterated anew, which restarts when it ends; a function
    that takes the epoch's number and returns an iterable; or an iterator, which cannot restart: DataError when it
    ends. An epoch without a batch is a DataError too. A sampler's `set_epoch` is called.

    The position is the epoch's random states at its start and the batches taken since. Resuming iterates the epoch
    anew and drops these batches, so it reads them once more; an iterator must be given from its beginning.
    """

    def __init__(self, data: Data) -> None:
        if not callable(data) and not isinstance(data, Iterable):
            raise DataError(f"the data is a {type(data).__name__}: give a DataLoader, an iterable or a function")
        self.data = data
        self.epoch = 0
        self.taken = 0
        self._batches: Iterator[Any] | None = None
        self._start: dict[str, Any] = {}

    def __next__(self) -> Any:
        if self._batches is None:
            self._begin()
        assert self._batches is not None
        try:
            batch = next(self._batches)
        except StopIteration:
            self._end()
            return next(self)
        self.taken += 1
        return batch

    def position(self) -> dict[str, Any]:
        """What a checkpoint holds of the stream."""
        return {"epoch": self.epoch, "taken": self.taken, "start": self._start if self._batches is not None else {}}

    def resume(self, position: dict[str, Any]) -> None:
        """Go to a position; DataError if the data is shorter. Random states are then as after dropping the batches."""
        self.epoch, self.taken, self._batches = position["epoch"], 0, None
        if not position["start"]:
            return
        set_random_state(position["start"], self.generators())
        self._begin()
        assert self._batches is not None
        for _ in range(position["taken"]):
            if next(self._batches, _MISSING) is _MISSING:
                raise DataError(f"the data has fewer than the {position['taken']} batches that the checkpoint counts")
            self.taken += 1

    def generators(self) -> list[torch.Generator]:
        """The generators that the loader and its sampler own."""
        owners = (self.data, *(getattr(self.data, name, None) for name in ("sampler", "batch_sampler")))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())

    def _begin(self) -> None:
        set_epoch = getattr(getattr(self.data, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        self._start = random_state(self.generators())
        self._batches = iter(self.data(self.epoch) if callable(self.data) else self.data)

    def _end(self) -> None:
        if self._batches is self.data:
            raise DataError(
                f"the data ended after {self.taken} batches, before the training did: give a DataLoader, which "
                "restarts, a longer iterator, or train for fewer steps"
            )
        if self.taken == 0:
            raise DataError(f"epoch {self.epoch} of the data has no batch: look at its length and drop_last")
        self.epoch, self.taken, self._batches = self.epoch + 1, 0, None


_MISSING = object()
