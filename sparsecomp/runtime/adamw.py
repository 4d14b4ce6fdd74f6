"""AdamW that knows the phases of a model's masked weights, so that no stale momentum or decay moves a pruned one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp.errors import MaskError
from sparsecomp.runtime.layers import masked_weights
from sparsecomp.runtime.masked_weight import MaskedWeight, Mode
from sparsecomp.runtime.optim import RESUSelective

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class RESUAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` over the parameters of a wrapped model, phase by phase of each masked weight.

    DENSE: AdamW, bit for bit. SPARSE: only active elements move; the moments of pruned ones are zero. RESU: active
    elements by AdamW, theta by RESUSelective with learning rate ``theta_lr`` (by default that of the weight's group,
    scheduled or not) and ``theta_decay``, on selected elements only.

    Args:
        model: from `sparsecomp.nn.wrap_module`; all its parameters that require gradients are taken.
        train_active: whether active elements move in a RESU phase; their gradient is needed in any case.
        tau, delta, select, amount: see `RESUSelective`.
        options: of `torch.optim.AdamW`, such as ``betas``, ``weight_decay`` or ``fused``.

    Raises:
        MaskError: a setting of theta's step outside its domain, or a masked weight with requires_grad False in its RESU
            phase, whose theta could never move.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, *, theta_lr: float | None = None, theta_decay: float = 0.0,
        train_active: bool = True, tau: float = 0.5, delta: float = 1e-12, select: str = "threshold",
        amount: float = 0.1, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=lr, **options)
        self._masked = {weight: masked for weight, masked in masked_weights(model).values()}
        self._theta = {"tau": tau, "delta": delta, "select": select, "amount": amount, "weight_decay": theta_decay}
        self._theta_lr, self._train_active = theta_lr, train_active
        self._selective: dict[Tensor, RESUSelective] = {}
        # the version of each weight's mask whose pruned elements have no moments
        self._known: dict[Tensor, int] = {}
        RESUSelective(torch.zeros(0, dtype=torch.int32), lr=theta_lr or lr, **self._theta)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; see the class. With a closure, its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._phases():
            super().step()
        return loss

    @contextmanager
    def _phases(self) -> Iterator[None]:
        """Hide from AdamW what is not its own, and do theta's step behind it."""
        whole: dict[Tensor, Tensor] = {}
        thetas: dict[Tensor, tuple[RESUSelective, Tensor]] = {}
        for weight, masked in self._masked.items():
            if masked.mode is Mode.RESU:
                self._check_frozen(weight)
            if masked.mode is Mode.DENSE or weight.grad is None:
                continue
            self._forget_pruned(weight, masked)
            if masked.mode is Mode.RESU:
                thetas[weight] = self._selective_of(weight, masked), masked.theta(weight)
            whole[weight] = weight.grad
            # the caller's gradient stays as it is
            hidden = masked.mode is Mode.RESU and not self._train_active
            weight.grad = None if hidden else masked.mask.apply_(weight.grad.clone())
        try:
            yield
        finally:
            for weight, gradient in whole.items():
                weight.grad = gradient
        for weight, (selective, theta) in thetas.items():
            # decay has reached theta too
            weight.view(-1).index_copy_(0, selective.pruned.long(), theta)
            selective.step(weight, whole[weight])

    def _forget_pruned(self, weight: Tensor, masked: MaskedWeight) -> None:
        """Zero the moments of pruned elements once for each state of the mask."""
        state = masked.mask.mask._version
        if self._known.get(weight) != state:
            self._zero_moments(weight, masked.mask.pruned)
            self._known[weight] = state

    def _check_frozen(self, weight: Tensor) -> None:
        if not weight.requires_grad:
            raise MaskError(
                "a weight in its RESU phase has requires_grad False, so theta would never move: set it to True and "
                "give train_active=False to leave active elements as they are"
            )

    def _selective_of(self, weight: Tensor, masked: MaskedWeight) -> RESUSelective:
        group = next(group for group in self.param_groups if any(weight is one for one in group["params"]))
        lr = float(group["lr"]) if self._theta_lr is None else self._theta_lr
        found = self._selective.get(weight)
        if found is None or found.pruned.shape != masked.mask.pruned.shape:
            settings = {"betas": group["betas"], "eps": group["eps"], **self._theta}
            found = self._selective[weight] = RESUSelective(masked.mask.pruned, lr=lr, **settings)
        found.lr = lr
        return found

    def reset(self, weight: Tensor, positions: Tensor) -> None:
        """Forget the moments of a weight's elements (flat positions), and all that is known of its theta."""
        self._zero_moments(weight, positions)
        self._selective.pop(weight, None)

    def _zero_moments(self, weight: Tensor, positions: Tensor) -> None:
        for name in _MOMENTS:
            if name in self.state.get(weight, {}):
                self.state[weight][name].view(-1).index_fill_(0, positions.long(), 0)

    def state_dict(self) -> dict[str, Any]:
        """torch's, with the state of each theta under ``theta``, by the number of its parameter."""
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        theta = {str(numbers[weight]): one.state_dict() for weight, one in self._selective.items()}
        return {**super().state_dict(), "theta": theta}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, of the same model with the same masks.

        Raises:
            MaskError: a theta of another mask; nothing of it is taken.
        """
        theta = state_dict.get("theta", {})
        parameters = [p for group in self.param_groups for p in group["params"]]
        found = {}
        for number, state in theta.items():
            weight = parameters[int(number)]
            selective = self._selective_of(weight, self._masked[weight])
            selective.load_state_dict(state)
            found[weight] = selective
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "theta"})
        self._selective = found
