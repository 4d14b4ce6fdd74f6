"""A misspelt option must never pass for a default."""

import dataclasses
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from rewriting import OnSpikes, site

import sparsecomp
from sparsecomp import options as option_names
from sparsecomp.errors import OptionError
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import Rule
from sparsecomp.passes.find_rules import RULES, enabled, in_order


def test_defaults():
    options = Options.parse()
    assert (options.precision, options.implementation, options.density, options.disable) == ("auto", "auto", None, ())
    assert not options.strict and not options.verify


def test_an_unknown_option_names_the_known_ones():
    with pytest.raises(OptionError, match=r"precison.*precision, implementation"):
        Options.parse(None, {"precison": "exact"})


def test_a_misspelt_name_is_told_the_nearest_wherever_it_is_given():
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    for use in (
        lambda: Options.parse(None, {"frozn": True}),
        lambda: sparsecomp.explain(model, x, frozn=True),
        lambda: sparsecomp.optimize(model, options={"frozn": True}),
    ):
        with pytest.raises(OptionError, match="unknown options.*'frozn'.*did you mean 'frozen'"):
            use()
    with pytest.raises(OptionError, match="keyword argument 'frozn' .did you mean 'frozen'.*mode, precision"):
        Options(frozn=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(OptionError, match="too many positional arguments"):
        Options(*range(12))  # pyright: ignore


@pytest.mark.parametrize(
    ("inductor", "message"),
    [({"max_autotun": True}, "did you mean 'max_autotune'"), ({"max_autotune": "no"}, "needs a value of type bool")],
)
def test_inductors_configuration_is_checked_before_it_compiles(inductor, message):
    with pytest.raises(OptionError, match=message):
        sparsecomp.optimize(torch.nn.Linear(2, 2), torch.ones(1, 2), inductor=inductor)
    with pytest.raises(OptionError, match=message):
        Options(inductor=inductor)
    assert Options.parse(None, {"inductor": {"triton.cudagraphs": True}}).inductor == {"triton.cudagraphs": True}


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "fp8"}, {"implementation": "cudnn"}, {"density": 1.5}, {"density": "low"}, {"density": True},
        {"strict": 1}, {"verify": "yes"}, {"disable": "spike_conv"}, {"disable": [3]}, {"neurons": "opaque"},
        {"inductor": 3}, {"mode": "fastest"}, {"frozen": "parameters"}, {"frozen": 0}, {"frozen": 1}, {"frozen": None},
        {"memory": "least"},
    ],
)  # fmt: skip
def test_a_value_outside_its_domain_is_refused(given):
    with pytest.raises(OptionError):
        Options.parse(None, given)


@pytest.mark.parametrize("number", [np.float32(0.25), np.float64(0.25), Fraction(1, 4), np.int64(1)])
def test_any_real_number_is_a_density(number):
    options = Options(density=number)
    assert type(options.density) is float and options.density == number
    assert options.cache_key() == Options(density=float(number)).cache_key()
    with pytest.raises(OptionError):
        Options(density=np.True_)


@pytest.mark.parametrize(("frozen", "parameter", "buffer"), [(False,) * 3, ("buffers", False, True), (True,) * 3])
def test_frozen_promises_for_parameters_and_buffers(frozen, parameter, buffer):
    weight, mask, options = torch.nn.Parameter(torch.ones(2)), torch.ones(2), Options.parse(None, {"frozen": frozen})
    assert options.promises(weight) == parameter and options.promises(mask) == buffer
    assert options.promises(mask, weight) == (parameter and buffer)


def test_options_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().precision = "tf32"


def test_the_environment_disables_rules(monkeypatch):
    monkeypatch.setenv("SPARSECOMP_DISABLE_PASSES", "spike_linear, spike_conv")
    assert Options.parse(None, {"disable": ["fold_batch_norm"]}).disable == (
        "fold_batch_norm", "spike_conv", "spike_linear",
    )  # fmt: skip
    monkeypatch.setenv("SPARSECOMP_DISABLE_PASSES", "all")
    assert enabled(Options.parse()) == ()


def test_the_other_rules_stay_on():
    assert [rule for rule in RULES if rule not in enabled(Options(disable=("spike_conv",)))] == [
        rule for rule in RULES if rule.name == "spike_conv"
    ]


def test_a_rule_runs_after_those_it_names():
    consider = RULES[0].consider
    last, first, between = Rule("a", consider, ("b", "c")), Rule("c", consider), Rule("b", consider, ("c",))
    assert in_order([last, first, between]) == (first, between, last)
    order = {rule.name: place for place, rule in enumerate(RULES)}
    assert all(order[before] < order[rule.name] for rule in RULES for before in rule.after)


@pytest.mark.parametrize(
    ("name", "text"), [("SPARSECOMP_DISABLE_PASSES", "spike_konv"), ("SPARSECOMP_DEBUG", "true")]
)
def test_a_malformed_environment_raises(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(OptionError, match=name):
        Options.parse()


@pytest.mark.parametrize(
    "use",
    [
        lambda: Options(disable=("spike_konv",)),
        lambda: sparsecomp.optimize(torch.nn.ReLU(), disable=["spike_konv"]),
        lambda: sparsecomp.optimize(torch.nn.ReLU(), torch.ones(2), disable=["spike_konv"]),
        lambda: sparsecomp.explain(torch.nn.ReLU(), torch.ones(2), options={"disable": ["spike_konv"]}),
        lambda: sparsecomp.sparsecomp_backend(
            torch.fx.symbolic_trace(torch.nn.ReLU()), [], options={"disable": ["spike_konv"]}
        ),
    ],
)  # fmt: skip
def test_a_misspelt_rule_is_refused_before_anything_is_compiled(use):
    with pytest.raises(OptionError, match=r"spike_konv.*did you mean 'spike_conv'.*fuse_neurons"):
        use()


def test_the_names_of_rules_are_known_without_the_rules():
    assert sorted(option_names.RULES) == sorted(rule.name for rule in RULES)
    code = """
import sys
from sparsecomp.errors import OptionError
from sparsecomp.options import Options
try:
    Options(disable=("spike_konv",))
except OptionError:
    print(sorted({"sparsecomp.passes", "sparsecomp.lowering", "triton", "torch._inductor"} & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_debug_verifies(monkeypatch):
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    assert Options.parse().verify


def test_the_cache_key_tells_options_apart_and_is_stable():
    a = Options.parse(None, {"disable": ["spike_conv", "spike_linear"]})
    b = Options.parse(None, {"disable": ["spike_linear", "spike_conv"]})
    assert a.cache_key() == b.cache_key() != Options.parse(None, {"precision": "tf32"}).cache_key()


def test_torch_compile_passes_the_error_on():
    with pytest.raises(OptionError, match="unknown options"):
        torch.compile(lambda x: x + 1, backend="sparsecomp", options={"nonsense": 1})(torch.ones(2))


@pytest.mark.slow(reason="Inductor compiles")
def test_torch_compile_takes_options_that_were_checked_where_they_were_made():
    options = Options(implementation="binary", precision="tf32")
    model = OnSpikes(torch.nn.Linear(16, 16))
    torch.compile(model, backend="sparsecomp", options=options)(torch.rand(4, 16))
    assert site(sparsecomp.last_report(), "spike_linear").precision == "tf32"


@pytest.mark.parametrize("options", ["exact", 5, [("mode", "default")], {"inductor": {1: 2, "max_autotune": True}}])
def test_options_of_a_wrong_type_raise(options):
    with pytest.raises(OptionError, match="dict"):
        Options.parse(None, options)
