"""What a user may ask of the compiler, parsed strictly: a misspelt option must not pass for a default."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from sparsecomp.environment import Settings
from sparsecomp.errors import OptionError, nearest, typed_arguments

_CHOICES = {
    "precision": ("auto", "exact", "tf32", "half"),
    "implementation": ("auto", "binary", "direct", "event", "skip", "dense"),
    "neurons": ("auto", "fuse"),
    "memory": ("auto", "low"),
    "frozen": (False, True, "buffers"),
    "mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
}
_FLAGS = ("strict", "verify")
RULES = (
    "fuse_neurons", "static_stem", "spike_conv", "sparse_linear", "sparse_matmul", "spike_linear", "masked_weight",
    "fold_batch_norm", "narrow_spikes", "gather_dot", "reorder_products", "spike_matmul", "fuse_steps",
    "active_linear", "spike_conv_transpose", "block_attention", "unrolled_neurons", "train_neurons", "fuse_conv_neuron",
    "decode_attention", "gated_pair", "byte_sums", "fuse_residual", "masked_writes", "shared_input",
    "shared_copies", "spike_attention", "bias_table", "neuron_norm", "wide_spikes",
)  # fmt: skip
"""Names of all rewrite rules, here too, so that a misspelt one is found before the rules and Inductor are loaded."""


@typed_arguments(OptionError)
@dataclass(frozen=True, slots=True)
class Options:
    """Options of the backend, `optimize` and `explain`.

    Attributes:
        mode: torch.compile's `mode`, with torch's meaning.
        precision: `exact` (relative error at most 1e-6), `tf32`, or `half` (what a half-precision model gets anyway);
            `auto` is `exact` for float32 models and `half` for float16 and bfloat16 ones. Where `exact` is asked for,
            sparse weights are multiplied sparsely and masked ones densely, as eager does, so that NaN and infinity in
            an input reach the same results; otherwise that is for finite inputs.
        implementation: `auto` lets the cost gate choose; anything else is forced at every legal site, on the CPU too,
            where the operators run their references.
        density: share of non-zero inputs to assume where none was measured, in [0, 1]; of masks of attention that are
            data, the share of blocks that are kept, and of caches that of keys, where all are reckoned with otherwise.
        neurons: `fuse` replaces spikingjelly's neuron operators by ours on the CPU too, runs layers in loops over time
            once, and hand-written neurons as one operator; `auto` replaces the former on CUDA only, and hand-written
            ones there in inference where that pays by estimate. In training they are replaced by ones that keep less.
        memory: of a training step of a spiking network. `auto` keeps spikes as bits and computes membranes again, at no
            cost of time; `low` also computes again in the backward what layers on spikes gave, by about a third more
            products than in `auto`. In inference it keeps no dense copy beside a sparse weight.
        frozen: a promise that parameters and buffers are not written to any more (True), or that buffers are not, such
            as masks, while parameters may train ("buffers"). What is worked out of such tensors is kept; without the
            promise it is worked out in each call, since nothing tells of every write. See
            `sparsecomp.ops.frozen_weights`, which promises it for a while.
        disable: names of rules not to run, or `all`; `RULES` lists them.
        strict: a rule that fails raises `RuleError` instead of leaving its site dense.
        verify: check the graph's structure, shapes and dtypes after each rule.
        inductor: Inductor configuration, such as `{"max_autotune": True}`.
    """

    mode: str = "default"
    precision: str = "auto"
    implementation: str = "auto"
    density: float | None = None
    neurons: str = "auto"
    memory: str = "auto"
    frozen: bool | str = False
    disable: tuple[str, ...] = ()
    strict: bool = False
    verify: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if repr(getattr(self, name)) not in map(repr, choices):  # 0 == False
                raise OptionError(f"{name}={getattr(self, name)!r}: use one of {', '.join(map(repr, choices))}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r}: use True or False")
        if self.density is not None:
            if not (_is_number(self.density) and 0 <= self.density <= 1):
                raise OptionError(f"density={self.density!r}: use None or a number in [0, 1]")
            object.__setattr__(self, "density", float(self.density))
        is_group = isinstance(self.disable, list | tuple | set | frozenset)
        if not is_group or not all(isinstance(name, str) for name in self.disable):
            raise OptionError(f"disable={self.disable!r}: use a tuple of names of rules")
        unknown = [name for name in self.disable if name not in (*RULES, "all")]
        if unknown:
            raise OptionError(
                f"disable or SPARSECOMP_DISABLE_PASSES names unknown rules {unknown}{nearest(unknown, RULES)}; "
                f"use 'all', or names of {', '.join(RULES)}"
            )
        object.__setattr__(self, "disable", tuple(sorted(self.disable)))
        if not isinstance(self.inductor, Mapping) or not all(isinstance(name, str) for name in self.inductor):
            raise OptionError(f"inductor={self.inductor!r}: use a dict of Inductor configuration names and values")
        if self.inductor:
            _check_inductor(self.inductor)

    @classmethod
    def parse(
        cls,
        mode: str | None = None,
        options: "Mapping[str, Any] | Options | None" = None,
        over: Mapping[str, Any] | None = None,
    ) -> "Options":
        """Options from what `torch.compile` passes to a backend, with the environment's on top.

        Args:
            mode: torch.compile's mode.
            options: names and values.
            over: more of them, which count over `options`.

        Raises:
            OptionError: an unknown option or name in `inductor`, a value outside its domain, or a malformed environment
                variable.
        """
        if isinstance(options, Options):
            given: dict[str, Any] = {item.name: getattr(options, item.name) for item in fields(cls)}
        elif options is None or isinstance(options, Mapping):
            given = dict(options or {})
        else:
            raise OptionError(f"options={options!r}: use a dict of option names and values")
        given |= over or {}
        known = [item.name for item in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise OptionError(f"unknown options {unknown}{nearest(unknown, known)}; the options are {', '.join(known)}")
        if mode is not None:
            given["mode"] = mode
        parsed = cls(**given)
        settings = Settings.from_environment()
        disable = tuple(dict.fromkeys((*parsed.disable, *settings.disable_passes)))
        verify = parsed.verify or settings.debug
        values = {item.name: getattr(parsed, item.name) for item in fields(cls)}
        return cls(**{**values, "disable": disable, "verify": verify})

    def promises(self, *kept: Tensor) -> bool:
        """Whether `frozen` says of all these tensors that they are not written to."""
        return self.frozen is True or (self.frozen == "buffers" and not any(isinstance(one, Parameter) for one in kept))

    def cache_key(self) -> str:
        """A stable text of every option that can change a compiled graph."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["inductor"] = sorted(self.inductor.items())
        return repr(sorted(values.items()))


def _check_inductor(given: Mapping[str, Any]) -> None:
    from sparsecomp import _compat  # its names load Inductor

    types = _compat.inductor_types()
    unknown = [name for name in given if name not in types]
    if unknown:
        raise OptionError(f"inductor={dict(given)}: Inductor has no configuration {unknown}{nearest(unknown, types)}")
    for name, value in given.items():
        if not isinstance(value, types[name]):
            raise OptionError(f"inductor={dict(given)}: {name} needs a value of type {types[name].__name__}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
