"""AdamW that knows the phases of a model's masked weights, so that no stale momentum or decay moves a pruned one."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.layers import masked_weights
from sparsecomp.nn.masked.masked_weight import MaskedWeight, Mode
from sparsecomp.reference.sharding import is_sharded, local, parted, sharded_as, whole
from sparsecomp.training.resu.optim import RESUSelective

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_NOWHERE = (torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))
"""Stands for moments that are still to be loaded."""
_OWN = ("_masked", "_theta", "_theta_lr", "_train_active", "selective", "_forgotten")


class RESUAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` over the parameters of a wrapped model, phase by phase of each masked weight.

    DENSE: AdamW, bit for bit. SPARSE: only active elements move; the moments of pruned ones are zero, and so are their
    gradients after a step. RESU: active elements by AdamW, theta by RESUSelective with learning rate `theta_lr` (by
    default that of the weight's group, scheduled or not) and `theta_decay`, on selected elements only; what is known
    of theta's gradients is forgotten when the mask changes.

    Args:
        model: from `sparsecomp.nn.wrap_module`; all its parameters that require gradients are taken.
        train_active: whether active elements move in a RESU phase; their gradient is needed in any case.
        tau, delta, select, amount: see `RESUSelective`.
        options: of `torch.optim.AdamW`, such as `betas`, `weight_decay` or `fused`.

    Attributes:
        selective: the step of theta, by the weights that are in their RESU phase.

    Raises:
        MaskError: a model that is not wrapped, a setting of theta's step outside its domain, or, in a step, a weight in
            its RESU phase whose theta could never move, as it has requires_grad False or is no parameter of this
            optimizer; nothing is changed.

    A step reads each mask as it is then, whoever wrote it, and waits for no device. For that it passes over all
    elements of a weight, pruned or not: on a GPU 18 bytes an element in a SPARSE phase, beside AdamW's own traffic (28
    if fused); in a RESU phase theta's step is one pass of 37, and a float32 number an element is kept more.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, *, theta_lr: float | None = None, theta_decay: float = 0.0,
        train_active: bool = True, tau: float = 0.5, delta: float = 1e-12, select: str = "threshold",
        amount: float = 0.1, **options: Any,
    ) -> None:  # fmt: skip
        weights = masked_weights(model)
        if not weights:
            raise MaskError("the model has no masked weight, and later ones would go unseen: call wrap_module before")
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=lr, **options)
        # so GradScaler unscales the gradients before any step: a fused AdamW would do it by itself, for itself alone
        self._step_supports_amp_scaling = False
        self._masked: dict[Tensor, MaskedWeight] = {weight: masked for weight, masked in weights.values()}
        self._theta = {"tau": tau, "delta": delta, "select": select, "amount": amount, "weight_decay": theta_decay}
        self._theta_lr, self._train_active = theta_lr, train_active
        self.selective: dict[Tensor, RESUSelective] = {}
        # copies of masks on a CPU, where comparing them is cheaper than to write the moments again
        self._forgotten: dict[Tensor, Tensor] = {}
        nowhere = torch.zeros(0, dtype=torch.int32, device="cpu")
        RESUSelective(nowhere, lr=lr if theta_lr is None else theta_lr, **self._theta)  # checks the settings

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; see the class. With a closure, its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = {p: group for group in self.param_groups for p in group["params"]}
        self._check_thetas(groups)
        self._end_phases()
        live = [one for one in self._masked.items() if one[1].mode is not Mode.DENSE and one[0].grad is not None]
        phases: dict[Tensor, Tensor] = {}
        for weight, masked in live:
            self._forget_pruned(weight, masked)
            assert weight.grad is not None
            if masked.mode is Mode.SPARSE:
                # a module that is not wrapped may have sent some to a weight it shares
                masked.mask.apply_(weight.grad)
            else:
                phases[weight], weight.grad = weight.grad, None
        # torch runs a step's hooks around the step of each class: ours has run them
        step = inspect.unwrap(torch.optim.AdamW.step, stop=lambda function: not getattr(function, "hooked", False))
        try:
            step(self)
        finally:
            for weight, gradient in phases.items():
                weight.grad = gradient
        for weight in phases:
            self._step_in_resu(weight, self._masked[weight], groups[weight])
        return loss

    def _step_in_resu(self, weight: Tensor, masked: MaskedWeight, group: dict[str, Any]) -> None:
        """Theta by its own step and active elements by AdamW, whose moments at pruned places are theta's averages.

        One weight after another, so that what is kept meanwhile is of one weight.
        """
        state = self._moments_of(weight, group)
        gradient, selective = local(weight.grad), self._selective_of(weight, masked, group)
        selective.step(local(weight), -gradient if group["maximize"] else gradient)
        if not self._train_active:
            return
        parts = [local(weight), *(local(state[name]) for name in _MOMENTS if name in state)]
        kept = [part.clone() for part in parts]
        beta1, beta2 = group["betas"]
        own, mean, square, *largest = parts
        adamw(
            [own], [gradient], [mean], [square], largest, [state["step"]], foreach=False,
            capturable=group["capturable"], amsgrad=group["amsgrad"], beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
        )  # fmt: skip
        for part, old in zip(parts, kept, strict=True):
            part.copy_(torch.where(local(parted(masked.mask.mask, weight)), part, old))

    def _moments_of(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """AdamW's state of a weight, made as torch makes it if there is none."""
        state = self.state[weight]
        if not state:
            device = weight.device if group["capturable"] or group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in _MOMENTS[: 3 if group["amsgrad"] else 2]:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state

    def _selective_of(self, weight: Tensor, masked: MaskedWeight, group: dict[str, Any]) -> RESUSelective:
        pruned, found = _pruned(masked, weight), self.selective.get(weight)
        if found is None or found.pruned.device != pruned.device:
            found = self.selective[weight] = RESUSelective(pruned, whole=self._whole(weight), **self._theta)
        found.follow(pruned)
        found.betas, found.eps = group["betas"], group["eps"]
        found.lr = float(group["lr"]) if self._theta_lr is None else self._theta_lr
        return found

    def _whole(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """AdamW's two moments, where theta's averages can be kept in them: in float32, as the weight lies in memory."""
        state = self.state[weight]
        if "exp_avg" not in state:
            return None
        kept = (local(weight), local(state["exp_avg"]), local(state["exp_avg_sq"]))
        fits = all(part.dtype is torch.float32 and part.is_contiguous() for part in kept)
        return kept[1:] if fits else None

    def _end_phases(self) -> None:
        """Let go what is known of the phases that weights are not in any more."""
        for weight, masked in self._masked.items():
            if masked.mode is not Mode.RESU:
                self.selective.pop(weight, None)
            if masked.mode is not Mode.SPARSE:
                self._forgotten.pop(weight, None)

    def _check_thetas(self, groups: dict[Tensor, Any]) -> None:
        for weight, masked in self._masked.items():
            if masked.mode is Mode.RESU and is_sharded(weight) and self._theta["select"] == "top":
                raise MaskError(
                    'select="top" ranks all of a weight, of which each process has a part: take "threshold" under FSDP2'
                )
            if masked.mode is Mode.RESU and not (weight.requires_grad and weight in groups):
                raise MaskError(
                    "a weight in its RESU phase has requires_grad False, or had when the optimizer was made, so theta "
                    "would never move: set it to True before and give train_active=False to leave active elements"
                )

    @torch.no_grad()
    def _forget_pruned(self, weight: Tensor, masked: MaskedWeight) -> None:
        """Zero the moments of pruned elements, but for those that are theta's averages."""
        found, mask = self.selective.get(weight), masked.mask.mask
        whole = self._whole(weight) if found is None else found.whole
        if masked.mode is Mode.SPARSE and mask.device.type == "cpu":
            if weight in self._forgotten and torch.equal(self._forgotten[weight], mask):
                return
            self._forgotten[weight] = mask.clone()
        for name in _MOMENTS[2 if masked.mode is Mode.RESU and whole is not None else 0 :]:
            moment = self.state.get(weight, {}).get(name)
            if moment is not None:
                masked.mask.apply_(moment)

    def reset(self, weight: Tensor, positions: Tensor) -> None:
        """Forget the moments of a weight's elements (flat positions), and all that is known of its theta."""
        self._zero_moments(weight, positions)
        self.selective.pop(weight, None)

    @torch.no_grad()
    def _zero_moments(self, weight: Tensor, positions: Tensor) -> None:
        for name in _MOMENTS:
            moment = self.state.get(weight, {}).get(name)
            if moment is not None:
                if is_sharded(moment):
                    chosen = torch.zeros(moment.shape, dtype=torch.bool, device=moment.device)
                    chosen.view(-1)[positions.long()] = True
                    local(moment).masked_fill_(local(parted(chosen, moment)), 0)
                    continue
                # a view, or a copy where the memory format is another
                flat = moment.reshape(-1).index_fill_(0, positions.long(), 0)
                if not moment.is_contiguous():
                    moment.copy_(flat.view(moment.shape))

    def state_dict(self) -> dict[str, Any]:
        """torch's; the state of a weight in its RESU phase has that of its theta under `theta`, sharded as the weight.

        There it goes where torch takes the state of a parameter, such as into a distributed checkpoint.
        """
        saved = super().state_dict()
        numbered = enumerate((p, group) for group in self.param_groups for p in group["params"])
        for number, (weight, group) in numbered:
            masked = self._masked.get(weight)
            if masked is None or masked.mode is not Mode.RESU or not self.state.get(weight):
                continue
            theta = self._selective_of(weight, masked, group).state_dict()
            whole_theta = {name: sharded_as(one, weight) if one.dim() else one for name, one in theta.items()}
            saved["state"][number] = {**saved["state"][number], "theta": whole_theta}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, of the same model, which has its masks and modes already.

        Raises:
            MaskError: a theta of another mask or model, or none of a weight in its RESU phase.
            ValueError: groups of parameters other than these; nothing is taken in either case.
        """
        thetas = self._saved_thetas(state_dict)
        states = {
            key: {name: one for name, one in state.items() if name != "theta"}
            for key, state in state_dict["state"].items()
        }
        others = {name: one for name, one in state_dict.items() if name != "theta"}
        super().load_state_dict({**others, "state": states})
        for weight, selective in thetas.items():
            if selective.whole is not None:
                selective.whole = self._whole(weight)
                if selective.whole is None:
                    self._copy_averages(weight, selective)
        self.selective, self._forgotten = thetas, {}

    def _saved_thetas(self, state_dict: dict[str, Any]) -> dict[Tensor, RESUSelective]:
        """What a state knows of the thetas, by their weights; MaskError as `load_state_dict`."""
        # by a parameter's number, or by its name in a state from torch.distributed.checkpoint
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = dict(zip(keys, (p for group in self.param_groups for p in group["params"]), strict=False))
        states, thetas = state_dict["state"], dict[Tensor, RESUSelective]()
        saved = {key: state["theta"] for key, state in states.items() if "theta" in state}
        # 0.1 kept them beside the parameters' states
        saved |= {int(number): theta for number, theta in state_dict.get("theta", {}).items()}
        for key, theta in saved.items():
            weight = parameters.get(key)
            if weight is None or weight not in self._masked:
                raise MaskError(f"the state has a theta of parameter {key}, which is no masked weight here")
            if "mean" not in theta and "exp_avg" not in states.get(key, {}):
                raise MaskError(f"the state has no averages of the theta of parameter {key}: give a whole state")
            kept = {"whole": _NOWHERE} if "mean" not in theta else {}
            thetas[weight] = RESUSelective(_pruned(self._masked[weight], weight), **kept, **self._theta)
            thetas[weight].load_state_dict({name: _part(one, weight) for name, one in theta.items()})
        for key, weight in parameters.items():
            masked = self._masked.get(weight)
            is_lost = masked is not None and masked.mode is Mode.RESU and weight not in thetas and states.get(key)
            if is_lost and "theta" not in state_dict:
                raise MaskError(
                    f"the state has nothing of the theta of parameter {key}, which is in its RESU phase: load the "
                    "model first, and ask for the optimizer's state that the saved one is read into afterwards"
                )
        return thetas

    def _copy_averages(self, weight: Tensor, selective: RESUSelective) -> None:
        """Give theta the averages that AdamW's moments hold, for a weight of another dtype or memory format."""
        for name, moment in (("mean", "exp_avg"), ("square", "exp_avg_sq")):
            selective.slots[name] = self.state[weight][moment].clone(memory_format=torch.contiguous_format).float()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}


def _part(saved: Tensor, weight: Tensor) -> Tensor:
    """This process's part of a tensor of the weight's shape, however it was sharded; a number itself."""
    return local(parted(saved, weight)) if is_sharded(weight) and saved.dim() else whole(saved)


def _pruned(masked: MaskedWeight, weight: Tensor) -> Tensor:
    """The pruned elements of this process's part of the weight."""
    return local(parted((~masked.mask.mask).contiguous(), weight))
