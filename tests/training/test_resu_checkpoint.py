"""Checkpoint files: a round trip of every kind of value, and damaged or foreign files."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from sparsecomp.errors import CheckpointError
from sparsecomp.training.loop.checkpoint import check_same_model, load_tree, save_tree


def test_every_kind_of_value_comes_back(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    tree = {
        "plain": [None, True, 3, -0.1, math.inf, "text", (1, (2, [])), {}],
        "integer keys": {0: {"step": torch.tensor(3.0)}, 1: (0.9, 0.999)},
        "tensors": [shared.T, shared, torch.zeros(0, 2), torch.tensor([True, False]), torch.ones(2).bfloat16()],
        "a tuple's name": ["tuple", ["tensor", "x"]],
    }
    save_tree(tmp_path / "run", tree)
    loaded = load_tree(tmp_path / "run")
    assert list(loaded) == list(tree)
    assert loaded["plain"] == tree["plain"] and loaded["a tuple's name"] == tree["a tuple's name"]
    assert loaded["integer keys"][1] == (0.9, 0.999) and loaded["integer keys"][0]["step"].equal(torch.tensor(3.0))
    for ours, theirs in zip(tree["tensors"], loaded["tensors"], strict=True):
        assert ours.dtype == theirs.dtype and ours.equal(theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_keys_that_look_like_places_hold_their_own_tensors(tmp_path):
    tree = {"a": {"b": torch.ones(2)}, "a/b": torch.zeros(3), 1: torch.ones(1), "1": torch.zeros(1)}
    save_tree(tmp_path / "run", tree)
    loaded = load_tree(tmp_path / "run")
    assert loaded["a"]["b"].equal(torch.ones(2)) and loaded["a/b"].equal(torch.zeros(3))
    assert loaded[1].equal(torch.ones(1)) and loaded["1"].equal(torch.zeros(1))


def test_floats_keep_their_bits(tmp_path):
    values = torch.randn(100, dtype=torch.float64).exp().tolist() + [5e-324, -0.0]
    save_tree(tmp_path / "run", {"values": values})
    assert [value.hex() for value in load_tree(tmp_path / "run")["values"]] == [value.hex() for value in values]


def test_what_a_checkpoint_cannot_hold(tmp_path):
    save_tree(tmp_path / "run", {"a": 1})
    for bad in ({"a": {1, 2}}, {"a": [len]}, {"a": {1.5: 0}}, {"a": torch.eye(2).to_sparse()}):
        with pytest.raises(CheckpointError):
            save_tree(tmp_path / "run", bad)
    assert load_tree(tmp_path / "run") == {"a": 1}, "the file before it stays"


def test_damaged_and_foreign_files(tmp_path):
    path = tmp_path / "run"
    save_tree(path, {"weight": torch.ones(50), "step": 3})
    whole = path.read_bytes()
    half = whole[: len(whole) // 2]
    for damaged in (b"", half, whole[:-1], whole[:-4] + b"\0\0\0\0", whole.replace(b"step", b"stop")):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_tree(path)
    for header in ({"version": 9, "tree": 0}, {"version": 1, "tree": ["dict", 3]}, {"tree": 0}, [], 3):
        save_file({"x": torch.ones(1)}, path, {"sparsecomp.checkpoint": json.dumps(header)})
        with pytest.raises(CheckpointError):
            load_tree(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="another file"):
        load_tree(path)
    with pytest.raises(OSError):
        load_tree(tmp_path / "missing")


def test_another_model():
    model = torch.nn.Linear(3, 2)
    check_same_model(model.state_dict(), model)
    for other in (torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2).half()):
        with pytest.raises(CheckpointError, match="another model"):
            check_same_model(other.state_dict(), model)
