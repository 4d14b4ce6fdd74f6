"""Settings of the cycle: what is refused, and that JSON carries them."""

import json

import pytest

from sparsecomp.errors import ConfigError
from sparsecomp.training.resu.config import RESUConfig


def test_json_carries_a_config():
    config = RESUConfig(pruner="n_of_m", n_of_m=(2, 4), sparsity_start=0.5, sparsity_end=0.5, skip=("head",))
    assert RESUConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_both_ends_of_the_schedules_are_reached():
    config = RESUConfig(cycles=5, train_steps=3, resu_steps=2, finetune_steps=7, sparsity_start=0.5, sparsity_end=0.9)
    assert (config.sparsity(0), config.sparsity(4), config.amnesty(0), config.amnesty(4)) == (0.5, 0.9, 0.3, 0.1)
    # halfway, Zhu & Gupta's cubic leaves an eighth of the way
    assert config.sparsity(2) == pytest.approx(0.9 - 0.4 / 8)
    assert config.steps == 32


def test_unknown_keys_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="'sparsity_ned' .did you mean 'sparsity_end'"):
        RESUConfig.from_dict({"sparsity_ned": 0.5})
    with pytest.raises(ConfigError, match="'cycels' .did you mean 'cycles'"):
        RESUConfig(cycels=3)
    with pytest.raises(ConfigError, match="'xyz'; its settings are cycles, train_steps"):
        RESUConfig.from_dict({"xyz": 0.5})


@pytest.mark.parametrize(
    "settings",
    [
        {"cycles": 0},
        {"cycles": True},
        {"train_steps": -1},
        {"train_steps": 1.5},
        {"accumulation": 0},
        {"sparsity_end": 1.0},
        {"sparsity_start": -0.1},
        {"sparsity_start": "0.5"},
        {"sparsity_end": float("nan")},
        {"amnesty_start": 1.5},
        {"schedule": "square"},
        {"pruner": "best"},
        {"pruner": "n_of_m"},
        {"n_of_m": (2, 4)},
        {"pruner": "n_of_m", "n_of_m": (2, 4)},
        {"pruner": "n_of_m", "n_of_m": (2, 4), "sparsity_start": 0.0, "sparsity_end": 0.5},
        {"pruner": "n_of_m", "n_of_m": (2, 4), "sparsity_start": 0.5, "sparsity_end": 0.6},
        {"pruner": "n_of_m", "n_of_m": (5, 4), "sparsity_start": 0.5, "sparsity_end": 0.5},
        {"pruner": "n_of_m", "n_of_m": 2, "sparsity_start": 0.5, "sparsity_end": 0.5},
        {"pruner": "sparsegpt", "stabiliser": "dsnot"},
        {"precision": "half"},
        {"skip": "head"},
    ],
)
def test_values_outside_their_domain(settings):
    with pytest.raises(ConfigError):
        RESUConfig(**settings)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("cycles", 1), ("train_steps", 0), ("resu_steps", 0), ("finetune_steps", 0), ("calibration_batches", 1),
        ("accumulation", 1), ("check_every", 1),
    ],
)  # fmt: skip
def test_counts_begin_where_they_make_sense(name, least):
    assert getattr(RESUConfig(**{name: least}), name) == least
    with pytest.raises(ConfigError, match=f"{name} is {least - 1}"):
        RESUConfig(**{name: least - 1})


@pytest.mark.parametrize("numbers", [(5, 4), (0, 4), (-1, 4)])
def test_a_group_keeps_one_weight_at_least_and_all_at_most(numbers):
    share = 1 - numbers[0] / numbers[1]
    with pytest.raises(ConfigError, match="1 <= n <= m is needed"):
        RESUConfig(pruner="n_of_m", n_of_m=numbers, sparsity_start=min(max(share, 0), 0.9), sparsity_end=0.9)
