"""A file gives back the matrix that was saved or a FormatError, and a failed save leaves the old file."""

import json
import os

import pytest
import torch
from matrices import LAYOUTS
from safetensors.torch import save_file

from sparsecomp import formats
from sparsecomp.errors import FormatError
from sparsecomp.files import tensor_file
from sparsecomp.formats import COO, CSR, SparseMatrix, files


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_saved_matrix_loads_as_it_was(name, tmp_path) -> None:
    path = tmp_path / "matrix.safetensors"
    for shape in ((7, 5), (1, 1), (0, 4), (4, 0), (2, 5, 6)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            dense = (torch.rand(shape) * (torch.rand(shape) < 0.4)).to(dtype)
            for index_dtype in (torch.int32, torch.int64):
                matrix = getattr(formats, name).from_dense(dense, index_dtype=index_dtype, **LAYOUTS[name])
                matrix.save(path)
                for loaded in (SparseMatrix.load(path), type(matrix).load(str(path))):
                    assert type(loaded) is type(matrix)
                    assert (loaded.shape, loaded.layout) == (matrix.shape, matrix.layout)
                    for one, other in zip(loaded.arrays.values(), matrix.arrays.values(), strict=True):
                        assert one.dtype is other.dtype and torch.equal(one, other)
    assert os.listdir(tmp_path) == ["matrix.safetensors"]


def test_a_slice_and_a_transpose_save_what_is_theirs(tmp_path) -> None:
    matrix = CSR.from_dense(torch.eye(1000)).slice_rows(2, 4)
    matrix.save(tmp_path / "slice")
    assert (tmp_path / "slice").stat().st_size < 2000
    assert CSR.load(tmp_path / "slice").allclose(matrix)
    blocks = formats.BSR.from_dense(torch.arange(12.0).view(3, 4), block=(2, 3)).mT
    blocks.save(tmp_path / "transpose")
    assert torch.equal(formats.BCSC.load(tmp_path / "transpose").to_dense(), torch.arange(12.0).view(3, 4).T)
    parameter = CSR.from_dense(torch.eye(2, requires_grad=True))
    parameter.save(tmp_path / "parameter")
    assert CSR.load(tmp_path / "parameter").allclose(torch.eye(2))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "matrix"
    CSR.from_dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).save(path)
    return path


def test_every_altered_or_missing_byte_is_noticed(saved) -> None:
    whole = saved.read_bytes()
    for place in range(len(whole)):
        for flip in (1, 0x80):
            saved.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            with pytest.raises(FormatError):
                CSR.load(saved)
        saved.write_bytes(whole[:place])
        with pytest.raises(FormatError, match="truncated|altered"):
            CSR.load(saved)
    saved.write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match="altered"):
        CSR.load(saved)


def test_what_is_no_matrix_of_ours(saved, tmp_path) -> None:
    with pytest.raises(FormatError, match="holds CSR, not COO: load it by CSR.load"):
        COO.load(saved)
    with pytest.raises(FileNotFoundError):
        CSR.load(tmp_path / "nowhere")
    for header in (None, {"sparsecomp": "no json"}, {"sparsecomp": "[]"}, {"sparsecomp": "{}"}, {"other": "{}"}):
        save_file({"values": torch.ones(1)}, saved, header)
        with pytest.raises(FormatError, match="no readable sparsecomp header"):
            SparseMatrix.load(saved)
    newer = {"version": 2, "format": "CSR", "shape": [1, 1], "layout": {}}
    save_file({"values": torch.ones(1)}, saved, {"sparsecomp": json.dumps(newer)})
    with pytest.raises(FormatError, match="version 2, this sparsecomp reads version 1"):
        SparseMatrix.load(saved)


@pytest.mark.parametrize(
    ("name", "shape", "layout", "match"),
    [
        ("CSR", (1, 2), {}, "crow has 3 entries, needs 2"),
        ("CSR", (2, 1), {}, r"col\[0\] is 1"),
        ("CSR", ("2", 2), {}, "shape is"),
        ("CSR", (2, 2), {"block": (1, 1)}, "does not hold what CSR needs"),
        ("COO", (2, 2), {}, "does not hold what COO needs"),
        ("NM", (2, 2), {"n": 2, "m": 4}, "does not hold what NM needs"),
        ("Pickle", (2, 2), {}, "holds Pickle"),
    ],
)
def test_a_good_digest_does_not_make_good_contents(saved, name, shape, layout, match) -> None:
    files.save_arrays(saved, name, shape, layout, CSR.from_dense(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).arrays)
    with pytest.raises(FormatError, match=match):
        SparseMatrix.load(saved)


def test_a_file_of_blocks_says_their_size(saved) -> None:
    arrays = formats.BSR.from_dense(torch.eye(2), block=2).arrays
    files.save_arrays(saved, "BSR", (2, 2), {"block": [1, 1]}, arrays)
    with pytest.raises(FormatError, match=r"block \[1, 1\]"):
        SparseMatrix.load(saved)


@pytest.mark.parametrize("step", ["save_file", "fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_and_no_other(saved, monkeypatch, step) -> None:
    def fail(*arguments):
        if step == "save_file":
            arguments[1].write_bytes(b"half")
        raise OSError("no space left")

    home = tensor_file if step == "save_file" else os
    monkeypatch.setattr(home, step, fail)
    with pytest.raises(OSError, match="no space left"):
        CSR.from_dense(torch.eye(3)).save(saved)
    assert CSR.load(saved).shape == (2, 2)
    assert os.listdir(saved.parent) == ["matrix"]


def test_a_link_stays_a_link(saved) -> None:
    link = saved.with_name("link")
    link.symlink_to(saved.name)
    CSR.from_dense(torch.eye(3)).save(link)
    assert link.is_symlink() and CSR.load(saved).shape == (3, 3)


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path) -> None:
    with pytest.raises(OSError):
        CSR.from_dense(torch.eye(2)).save(tmp_path / "nowhere" / "matrix")
