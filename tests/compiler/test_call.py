"""Every verb is told of a model, its inputs and its options in the same way."""

import functools
import logging

import pytest
import torch
from rewriting import AttributeLIF, ConvNet, OnSpikes, dyadic, site
from torch import nn

import sparsecomp
from sparsecomp import cache
from sparsecomp.compiler.call import Call
from sparsecomp.errors import InputError, OptionError

pytestmark = [pytest.mark.quick_cases(2), pytest.mark.usefixtures("op_by_op")]

VERBS = [sparsecomp.explain, sparsecomp.optimize, sparsecomp.profile, sparsecomp.tune, cache.warmup]
QUICK = {sparsecomp.profile: {"repetitions": 1}}


class Scaled(nn.Module):
    """Takes an input by keyword that has the name of an option, and one that has not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: list[tuple[float, float]] = []

    def forward(self, x: torch.Tensor, density: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return self.layer(x) * density + shift


@pytest.mark.parametrize("verb", VERBS)
def test_options_may_be_keywords_or_a_dict_and_inputs_go_to_the_model(verb) -> None:
    own = QUICK.get(verb, {})
    verb(Scaled(), torch.ones(3, 4), precision="exact", shift=2.0, **own)
    verb(Scaled(), torch.ones(3, 4), options={"precision": "exact"}, shift=2.0, **own)
    verb(Scaled(), x=torch.ones(3, 4), options=sparsecomp.Options(precision="exact"), **own)


@pytest.mark.parametrize("verb", VERBS)
def test_a_name_that_is_both_an_option_and_an_input_is_refused_and_can_be_told_apart(verb) -> None:
    own = QUICK.get(verb, {})
    with pytest.raises(InputError, match=r"density= may be meant .* input 'density' of Scaled: .*kwargs="):
        verb(Scaled(), torch.ones(3, 4), density=0.5, **own)
    verb(Scaled(), torch.ones(3, 4), kwargs={"density": 0.5}, density=0.1, **own)


def test_what_was_told_apart_arrives_where_it_was_meant_to() -> None:
    model, x = Scaled(), torch.ones(3, 4)
    given = {"density": 0.5, "shift": 1.0}
    assert Call.of(model, (x,), None, given, {"density": 0.25}).options.density == 0.25
    optimized = sparsecomp.optimize(model, x, kwargs=given, density=0.25)
    torch.testing.assert_close(optimized(x, density=0.5, shift=1.0), model.layer(x) * 0.5 + 1.0)


def test_keywords_of_the_verb_itself_are_told_apart_too() -> None:
    def repeated(x: torch.Tensor, repetitions: int = 1, options: int = 0) -> torch.Tensor:
        return x * repetitions + options

    for given in ({"repetitions": 3}, {"options": {"precision": "exact"}}):
        with pytest.raises(InputError, match="may be meant"):
            sparsecomp.profile(repeated, torch.ones(2), **given)
    sparsecomp.profile(repeated, torch.ones(2), repetitions=3, kwargs={"repetitions": 2})


@pytest.mark.parametrize("verb", VERBS)
def test_unknown_names_are_refused_with_those_that_are_known(verb) -> None:
    for given in ({"precison": "exact"}, {"options": {"precison": "exact"}}, {"kwargs": {}, "precison": "exact"}):
        with pytest.raises(OptionError, match=r"precison.*options are mode, precision"):
            verb(Scaled(), torch.ones(3, 4), **given)


@pytest.mark.parametrize("verb", VERBS)
def test_the_old_spellings_work_or_name_the_new_one(verb) -> None:
    own = QUICK.get(verb, {})
    with pytest.warns(FutureWarning, match="one by one"):
        verb(nn.Bilinear(2, 2, 2), (torch.ones(1, 2), torch.ones(1, 2)), **own)
    with pytest.raises(InputError, match="example_inputs= is the old spelling"):
        verb(Scaled(), example_inputs=torch.ones(3, 4), **own)


def test_a_model_of_one_tuple_gets_it_as_it_is() -> None:
    def added(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]

    pair = torch.ones(2), torch.ones(2)
    assert torch.equal(sparsecomp.optimize(added, pair)(pair), torch.full((2,), 2.0))


@pytest.mark.parametrize("verb", VERBS)
def test_what_eager_refuses_is_raised_as_eager_says_it(verb) -> None:
    model, x = nn.Linear(4, 2), torch.ones(3, 5)
    with pytest.raises(RuntimeError) as eager:
        model(x)
    with pytest.raises(RuntimeError) as ours:
        verb(model, x, **QUICK.get(verb, {}))
    assert type(ours.value) is type(eager.value) and str(ours.value) == str(eager.value)


@pytest.mark.parametrize("verb", [sparsecomp.explain, sparsecomp.optimize, sparsecomp.profile, sparsecomp.tune])
def test_what_cannot_be_called_is_refused(verb) -> None:
    with pytest.raises(InputError, match="int is neither a module nor a function"):
        verb(3, torch.ones(1))


@pytest.mark.parametrize("verb", VERBS)
def test_inputs_by_name_that_are_no_dict_are_refused(verb) -> None:
    for kwargs in ([1], "ab", 3, {1: torch.ones(1)}):
        with pytest.raises(InputError, match=r"kwargs is a .*, not a dict of the model's inputs by name"):
            verb(Scaled(), torch.ones(3, 4), kwargs=kwargs)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["weight of Linear", "input 0 of Linear", "input of Linear", "running_mean"])
def test_tensors_without_values_are_refused_with_what_to_do(verb, place) -> None:
    model, x, kwargs = nn.Linear(4, 2), torch.ones(3, 4), {}
    if place == "weight of Linear":
        model = model.to("meta")
    elif place == "input 0 of Linear":
        x = x.to("meta")
    elif place == "input of Linear":
        kwargs = {"input": x.to("meta")}
    else:
        model = nn.Sequential(model, nn.BatchNorm1d(2, affine=False, device="meta"))
    args = () if kwargs else (x,)
    with pytest.raises(InputError, match=rf"{place}.* on the meta device.*to_empty\(device='cpu'\)"):
        verb(model, *args, kwargs=kwargs or None)


def test_an_optimized_model_may_get_its_values_later() -> None:
    model = nn.Linear(4, 2, device="meta")
    optimized = sparsecomp.optimize(model)
    model.to_empty(device="cpu").requires_grad_(False).weight.fill_(1.0)
    model.bias.zero_()
    assert torch.equal(optimized(torch.ones(3, 4)), torch.full((3, 2), 4.0))


def test_an_effort_and_a_number_of_repetitions_that_there_are_not_are_refused() -> None:
    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    for effort in ("ful", 3, None):
        for verb, args in ((sparsecomp.tune, (model, x)), (cache.warmup, ([],))):
            with pytest.raises(OptionError, match=r"effort=.*'quick', 'full'"):
                verb(*args, effort=effort)
    for repetitions in ("3", 2.5, True, 0):
        with pytest.raises(InputError, match="repetitions=.*use an int of at least 1"):
            sparsecomp.profile(model, x, repetitions=repetitions)


def test_signatures_take_no_inputs() -> None:
    with pytest.raises(InputError, match="tuned by themselves"):
        cache.warmup([], torch.ones(1))
    assert cache.warmup([]) == []


NET = dyadic(ConvNet()).eval()


def of_a_global(x: torch.Tensor) -> torch.Tensor:
    return NET(x).softmax(1)


def of_another_function(x: torch.Tensor) -> torch.Tensor:
    return of_a_global(x) + 1


class Agent:
    """No module itself, but holds one."""

    def __init__(self) -> None:
        self.net = dyadic(ConvNet()).eval()

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).argmax(1)

    __call__ = act


def functions():
    net, agent = dyadic(ConvNet()).eval(), Agent()
    yield "closure", lambda x: net(x) + 1, net
    yield "global", of_a_global, NET
    yield "called", of_another_function, NET
    yield "partial", functools.partial(lambda net, x: net(x), net), net
    yield "method of a module", net.forward, net
    yield "method", agent.act, agent.net
    yield "callable", agent, agent.net


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize(("function", "net"), [pytest.param(f, net, id=name) for name, f, net in functions()])
def test_functions_work_as_modules_do_and_their_modules_are_left_as_they_were(function, net) -> None:
    x = 2 * torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        report = sparsecomp.explain(function, x, implementation="binary")
        assert site(report, "spike_conv").rewritten and site(report, "spike_conv").density_source == "measured"
        names = [layer.name.split(".")[-1] for layer in sparsecomp.profile(function, x, repetitions=1).layers]
        assert names == ["first", "norm", "fire1", "second", "fire2", "head"]
        optimized = sparsecomp.optimize(function, x, implementation="binary")
        assert site(optimized.report, "spike_conv").rewritten
        assert all(module.v is None for module in net.modules() if isinstance(module, AttributeLIF))
        found = optimized(x)
        for module in net.modules():
            if isinstance(module, AttributeLIF):
                module.v = None
        torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-5)
        for module in net.modules():
            if isinstance(module, AttributeLIF):
                module.v = None


def test_a_failed_capture_is_one_line_with_its_reason(monkeypatch, caplog) -> None:
    def broken(*_):
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr("sparsecomp.compiler.optimize.compile_graph", broken)
    model, x = OnSpikes(nn.Linear(4, 4)), torch.ones(1, 4)
    with caplog.at_level(logging.WARNING, "sparsecomp"):
        optimized = sparsecomp.optimize(model, x)
    (record,) = [record for record in caplog.records if record.name == "sparsecomp"]
    assert record.exc_info is None and "\n" not in record.getMessage()
    assert record.getMessage().endswith("torch.compile failed: RuntimeError: no compiler")
    torch.testing.assert_close(optimized(x), model(x))


def test_a_class_is_no_model() -> None:
    class Model(nn.Module):
        pass

    with pytest.raises(InputError, match="is a class"):
        sparsecomp.explain(Model)
    assert "__call__" not in vars(Model)


def test_a_lazy_model_is_given_its_shapes_and_works_on() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
    x = torch.randn(3, 4)
    sparsecomp.explain(model, x)
    assert model(x).shape == (3, 8) and type(model[0]) is nn.Linear


def test_a_function_without_a_signature_may_take_any_name():
    report = sparsecomp.explain(torch.add, torch.ones(2), other=torch.ones(2))
    assert report.graphs == 1
