"""What acts on a model behind some of a training's steps: it counts them all, and a run goes on from its count."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Stepped(ABC):
    """Counts steps.

    Attributes:
        steps: that were counted so far.
    """

    steps = 0
    replaces_step = False
    """Whether what it does takes the place of that step's optimizer step; else it acts behind that."""

    @property
    @abstractmethod
    def due(self) -> bool:
        """Whether this step is one of those that act."""

    def watch(self) -> AbstractContextManager[None]:
        """Around forward and backward, of which some want to know."""
        return nullcontext()

    @torch.no_grad()
    def update(self) -> bool:
        """Count a step, and act behind it if that is due, with True.

        Raises what `act` raises; then nothing has changed, and the step is not counted.
        """
        acts = self.due
        if acts:
            self.act()
        self.steps += 1
        return acts

    @abstractmethod
    def act(self) -> None:
        """What is done in a step that is due."""

    def state_dict(self) -> dict[str, Any]:
        """What a run goes on from, beside the model's and the optimizer's."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps = int(state["steps"])
