"""AdamW that knows the phases of a model's masked weights, so that no stale momentum or decay moves a pruned one."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp.errors import MaskError
from sparsecomp.runtime.effective_weight import load_theta_
from sparsecomp.runtime.layers import masked_weights
from sparsecomp.runtime.masked_weight import MaskedWeight, Mode
from sparsecomp.runtime.optim import RESUSelective

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_OWN = ("_masked", "_theta", "_theta_lr", "_train_active", "_selective", "_known")


class RESUAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` over the parameters of a wrapped model, phase by phase of each masked weight.

    DENSE: AdamW, bit for bit. SPARSE: only active elements move; the moments of pruned ones are zero, and so are their
    gradients after a step. RESU: active elements by AdamW, theta by RESUSelective with learning rate ``theta_lr`` (by
    default that of the weight's group, scheduled or not) and ``theta_decay``, on selected elements only; what is known
    of theta's gradients is forgotten when the mask changes.

    Args:
        model: from `sparsecomp.nn.wrap_module`; all its parameters that require gradients are taken.
        train_active: whether active elements move in a RESU phase; their gradient is needed in any case.
        tau, delta, select, amount: see `RESUSelective`.
        options: of `torch.optim.AdamW`, such as ``betas``, ``weight_decay`` or ``fused``.

    Raises:
        MaskError: a setting of theta's step outside its domain, or, in a step, a weight in its RESU phase whose theta
            could never move, as it has requires_grad False or is no parameter of this optimizer; nothing is changed.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, *, theta_lr: float | None = None, theta_decay: float = 0.0,
        train_active: bool = True, tau: float = 0.5, delta: float = 1e-12, select: str = "threshold",
        amount: float = 0.1, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=lr, **options)
        # so GradScaler unscales the gradients before any step: a fused AdamW would do it by itself, for itself alone
        self._step_supports_amp_scaling = False
        self._masked = {weight: masked for weight, masked in masked_weights(model).values()}
        self._theta = {"tau": tau, "delta": delta, "select": select, "amount": amount, "weight_decay": theta_decay}
        self._theta_lr, self._train_active = theta_lr, train_active
        self._selective: dict[Tensor, RESUSelective] = {}
        # the positions of each weight that have no moments: those of one state of its mask
        self._known: dict[Tensor, Tensor] = {}
        RESUSelective(torch.zeros(0, dtype=torch.int32), lr=lr if theta_lr is None else theta_lr, **self._theta)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; see the class. With a closure, its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = {p: group for group in self.param_groups for p in group["params"]}
        self._check_thetas(groups)
        live = [one for one in self._masked.items() if one[1].mode is not Mode.DENSE and one[0].grad is not None]
        # torch runs a step's hooks around the step of each class: ours has run them
        step = inspect.unwrap(torch.optim.AdamW.step, stop=lambda function: not getattr(function, "hooked", False))
        with ExitStack() as hidden:
            for weight, masked in live:
                self._forget_pruned(weight, masked)
                hidden.enter_context(self._active_alone(weight, masked))
            step(self)
        for weight, masked in live:
            if masked.mode is Mode.RESU:
                self._step_theta(weight, masked, groups[weight])
        return loss

    @contextmanager
    def _active_alone(self, weight: Tensor, masked: MaskedWeight) -> Iterator[None]:
        """Hide theta, or in its phase all that is not to be trained, from AdamW; the gradient is whole again after."""
        gradient = weight.grad
        assert gradient is not None
        if masked.mode is Mode.SPARSE:
            # a module that is not wrapped may have sent some to a weight it shares
            masked.mask.apply_(gradient)
            yield
        elif not self._train_active:
            weight.grad = None
            try:
                yield
            finally:
                weight.grad = gradient
        else:
            theta, of_theta = masked.theta(weight), masked.theta_grad(weight)
            masked.mask.apply_(gradient)
            try:
                yield
            finally:
                # decay has reached theta too
                load_theta_(weight, theta, masked.mask)
                load_theta_(gradient, of_theta, masked.mask)

    def _step_theta(self, weight: Tensor, masked: MaskedWeight, group: dict[str, Any]) -> None:
        pruned, found = masked.mask.pruned, self._selective.get(weight)
        if found is None or (found.pruned is not pruned and not _same(found.pruned, pruned)):
            found = self._selective[weight] = RESUSelective(pruned, **self._theta)
        found.pruned, found.betas, found.eps = pruned, group["betas"], group["eps"]
        found.lr = float(group["lr"]) if self._theta_lr is None else self._theta_lr
        assert weight.grad is not None
        found.step(weight, -weight.grad if group["maximize"] else weight.grad)

    def _check_thetas(self, groups: dict[Tensor, Any]) -> None:
        for weight, masked in self._masked.items():
            if masked.mode is Mode.RESU and not (weight.requires_grad and weight in groups):
                raise MaskError(
                    "a weight in its RESU phase has requires_grad False, or had when the optimizer was made, so theta "
                    "would never move: set it to True before and give train_active=False to leave active elements"
                )

    def _forget_pruned(self, weight: Tensor, masked: MaskedWeight) -> None:
        """Zero the moments of pruned elements once for each state of the mask."""
        pruned = masked.mask.pruned
        if self._known.get(weight) is not pruned:
            self._zero_moments(weight, pruned)
            self._known[weight] = pruned

    def reset(self, weight: Tensor, positions: Tensor) -> None:
        """Forget the moments of a weight's elements (flat positions), and all that is known of its theta."""
        self._zero_moments(weight, positions)
        self._selective.pop(weight, None)

    @torch.no_grad()
    def _zero_moments(self, weight: Tensor, positions: Tensor) -> None:
        for name in _MOMENTS:
            moment = self.state.get(weight, {}).get(name)
            if moment is not None:
                # a view, or a copy where the memory format is another
                flat = moment.reshape(-1).index_fill_(0, positions.long(), 0)
                if not moment.is_contiguous():
                    moment.copy_(flat.view(moment.shape))

    def state_dict(self) -> dict[str, Any]:
        """torch's, with the state of each theta under ``theta``, by the number of its parameter."""
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        theta = {str(numbers[weight]): one.state_dict() for weight, one in self._selective.items()}
        return {**super().state_dict(), "theta": theta}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, of the same model, which has its masks already.

        Raises:
            MaskError: a theta of another mask or model.
            ValueError: groups of parameters other than these; nothing is taken in either case.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        thetas = {}
        for number, state in state_dict.get("theta", {}).items():
            if int(number) >= len(parameters) or parameters[int(number)] not in self._masked:
                raise MaskError(f"the state has a theta of parameter {number}, which is no masked weight here")
            weight = parameters[int(number)]
            thetas[weight] = RESUSelective(self._masked[weight].mask.pruned, **self._theta)
            thetas[weight].load_state_dict(state)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "theta"})
        self._selective, self._known = thetas, {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)
