"""What is offered for operands in odd layouts, and what is then launched, written down.

That the launches compute the right thing is for the kernels' tests to say, on small problems. A grid that is too large,
a workspace that nobody fills or a copy that nobody needs changes no result, so it shows here.
`python -m tests.tuning.test_launch_table` writes the table anew.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.epilogue import Output
from sparsecomp.lowering.launch.launch import Launch
from sparsecomp.lowering.launch.sequence import Launches
from sparsecomp.lowering.launch.strided import Strides
from sparsecomp.lowering.masked.effective_weight import Merge, PackMask, Split
from sparsecomp.lowering.masked.select_largest import SelectLargest
from sparsecomp.lowering.masked.selective_step import SelectiveStep
from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear, random_longest
from sparsecomp.lowering.sparse.narrow import SpmmNarrow
from sparsecomp.lowering.sparse.packed_linear import PackedLinear, order_for
from sparsecomp.lowering.sparse.sddmm import Sddmm
from sparsecomp.lowering.sparse.spmm_bsr import BlockStrides, SpmmBsr
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr
from sparsecomp.lowering.sparse.spmm_nm import SpmmNM
from sparsecomp.lowering.sparse.stored_places import WriteOut
from sparsecomp.lowering.spiking.binary_conv import binary_conv_problem
from sparsecomp.lowering.spiking.conv_lif import conv_lif_problem
from sparsecomp.lowering.spiking.conv_neuron import Described, conv_neuron_problem
from sparsecomp.lowering.spiking.convolution import Convolution, Maps
from sparsecomp.lowering.spiking.event_conv import Accumulate, FindEvents, PackEvents
from sparsecomp.lowering.spiking.lif import Lif
from sparsecomp.lowering.spiking.neuron import Axis, Neurons
from sparsecomp.lowering.spiking.packing import Cast, CastStrided
from sparsecomp.lowering.spiking.skip_conv import ListRows
from sparsecomp.lowering.tuning.operations import all_operations
from sparsecomp.lowering.tuning.template import Candidate
from sparsecomp.reference.geometry import Window
from sparsecomp.reference.neuron import neuron_of

pytest.importorskip("triton")  # templates hold their kernels

TABLE = Path(__file__).with_name("launch_table.json")
H100, A100 = Device("H100", "9.0", "3.6.0"), Device("A100", "8.0", "3.6.0")

LAYOUTS = {
    "rows": Strides(7000, 70, 1),
    "columns": Strides(7000, 1, 100),
    "spread": Strides(7000, 140, 2),
    "shared": Strides(0, 70, 1),
    "shared columns": Strides(0, 1, 100),
}
"""Of a matrix (100, 70) or smaller in a batch."""
FINISHED = Output(
    Strides(9000, 90, 1), "float32", "float32", "column", "float32", Strides(9000, 1, 100), "gelu", 0.5
)  # fmt: skip
PLAIN = Output(Strides(9000, 1, 90), "float32", "", "", "", Strides(0, 0, 0), "none", 1.0)


def _spmm_csr(layout: str, **changes: Any) -> SpmmCsr:
    return SpmmCsr(
        90, 100, 70, 3, 1200, 1, 1200, LAYOUTS[layout], "float32", "float32", "int32", PLAIN
    )._replace(**changes)  # fmt: skip


def _spmm_bsr(layout: str, **changes: Any) -> SpmmBsr:
    return SpmmBsr(
        90, 100, 70, 3, 16, 16, 6, 7, 12, 1, BlockStrides(12 * 256, 256, 16, 1), LAYOUTS[layout], "float32", "float32",
        "int32", PLAIN,
    )._replace(**changes)  # fmt: skip


def _spmm_nm(layout: str, **changes: Any) -> SpmmNM:
    return SpmmNM(
        90, 100, 70, 3, 2, 4, 4500, 50, 50, LAYOUTS[layout], "float32", "float32", PLAIN
    )._replace(**changes)  # fmt: skip


def _bitmap(n: int, dtype: str = "float16", **changes: Any) -> BitmapLinear:
    m, k = changes.get("m", 90), changes.get("k", 1104)
    out = Output(Strides(0, 1, m), dtype, dtype, "row", "", Strides(0, 0, 0), "silu", 1.0)
    grain = changes.get("grain", 1)
    problem = BitmapLinear(m, k, n, m * k // 3, grain, random_longest(m, k, m * k // 3, grain), dtype, "int32", out)
    return problem._replace(**changes)


def _narrow(n: int, **changes: Any) -> SpmmNarrow:
    lying, out = Strides(0, 1, 100), PLAIN._replace(strides=Strides(0, 1, 90))
    return SpmmNarrow(
        90, 100, n, 1, 1200, lying, "float32", "float32", "int32", "uint8", out
    )._replace(**changes)  # fmt: skip


def _packed(n: int, dtype: str = "float16", **changes: Any) -> PackedLinear:
    out = PLAIN._replace(strides=Strides(0, 1, 90), dtype=dtype, bias=dtype, bias_axis="row", activation="silu")
    return PackedLinear(90, 1100, n, order_for(n), False, dtype, out)._replace(**changes)


def _sddmm(a: str, b: str, **changes: Any) -> Sddmm:
    return Sddmm(
        100, 90, 70, 3, 1200, 1, LAYOUTS[a], LAYOUTS[b], 1200, 0.5, "float32", "float32", "int32"
    )._replace(**changes)  # fmt: skip


def _conv(**changes: Any) -> Convolution:
    window = Window((3, 3), (2, 1), (1, 0), (1, 2))
    conv = Convolution.of((3, 20, 11, 13), (24, 20, 3, 3), window, dtype="float32", has_bias=True)
    return conv._replace(**changes)


def _conv1d(groups: int) -> Convolution:
    return Convolution.of((5, 32, 40), (48, 32 // groups, 5), Window((5,), (1,), (2,), (1,)), groups)


HALF = {"dtype": "float16", "dense_dtype": "float16"}
STEP = ("float32", "float16", "int64", "float32")
PROBLEMS: dict[str, list[Any]] = {
    "spmm_csr": [
        *(_spmm_csr(layout) for layout in LAYOUTS),
        *(_spmm_csr(layout, values_batch=0) for layout in ("rows", "shared columns")),
        *(_spmm_csr(layout, **HALF) for layout in ("columns", "shared")),
        _spmm_csr("rows", output=FINISHED),
        _spmm_csr("columns", output=FINISHED, index_dtype="int64", filled=True),
        _spmm_csr("rows", n=1, batch=1), _spmm_csr("columns", n=7), _spmm_csr("rows", nnz=0), _spmm_csr("rows", m=1),
        _spmm_csr("rows", variation=3, nnz=8000),
    ],
    "spmm_bsr": [
        *(_spmm_bsr(layout) for layout in LAYOUTS),
        _spmm_bsr("rows", values=BlockStrides(0, 256, 1, 16)), _spmm_bsr("columns", output=FINISHED, **HALF),
        _spmm_bsr("rows", height=8, width=24, block_rows=12, block_columns=5, values=BlockStrides(0, 192, 24, 1)),
        _spmm_bsr("rows", n=1), _spmm_bsr("rows", blocks=0), _spmm_bsr("rows", height=64, width=64, block_rows=2),
    ],
    "spmm_nm": [
        *(_spmm_nm(layout) for layout in LAYOUTS),
        _spmm_nm("rows", values_batch=0), _spmm_nm("columns", output=FINISHED, **HALF),
        _spmm_nm("rows", keep=3, group=5, values_row=60, indices_row=61), _spmm_nm("rows", keep=1, group=16, n=1),
    ],
    "spmm_narrow": [
        *(_narrow(n) for n in (1, 2, 5, 16)), _narrow(1, dense=Strides(0, 3, 1)), _narrow(1, distance="int16"),
        _narrow(3, index_dtype="int64"), _narrow(1, nnz=0),
    ],
    "bitmap_pair": [_bitmap(1), _bitmap(16, "bfloat16")],
    "bitmap_two": [_bitmap(1, parts=(50, 40))],
    "bitmap_three": [_bitmap(9, parts=(50, 39, 1))],
    "narrow_pair": [_narrow(1), _narrow(5), _narrow(1, distance="uint8+int16")],
    "csr_pair": [_spmm_csr("columns", n=7, batch=1), _spmm_csr("columns", n=64, batch=1, m=1)],
    "packed_linear": [
        _packed(1), _packed(8, "bfloat16"), _packed(1, pair=True), _packed(7, pair=True), _packed(3, k=1024),
        _packed(2, m=1), _packed(1, k=1101), _packed(1, output=FINISHED), _packed(1, order="fragments"),
    ],
    "bitmap_linear": [
        _bitmap(1), _bitmap(9, "bfloat16"), _bitmap(16, m=1, k=1024), _bitmap(2, k=1101), _bitmap(17),
        _bitmap(1, output=FINISHED), _bitmap(5, grain=2),
    ],
    "sddmm": [
        *(_sddmm(a, b) for a, b in itertools.product(("rows", "columns", "spread"), repeat=2)),
        _sddmm("shared", "columns"), _sddmm("shared columns", "shared columns"),
        _sddmm("rows", "columns", d=1), _sddmm("columns", "rows", d=2), _sddmm("rows", "rows", nnz=0, out_batch=0),
        _sddmm("columns", "columns", dtype="float16", out_dtype="float16", index_dtype="int64"),
        _sddmm("rows", "spread", batch=1, variation=3),
    ],
    "binary_conv": [
        binary_conv_problem(_conv1d(1), 3, "all"), binary_conv_problem(_conv1d(2), 2, "all"),
        binary_conv_problem(_conv(c=32, k=48), 1, "all"), binary_conv_problem(_conv(c=32, k=48), 4, "rows"),
    ],
    "event_conv": [Accumulate(_conv(), 900, 132), Accumulate(_conv(has_bias=False), 10, 7)],
    "find_events": [FindEvents(1, 1, 1, 1, "float32"), FindEvents(77, 13, 20, 300, "float16")],
    "pack_events": [PackEvents(Maps(24, 20, (3, 3), (180, 9, 3, 1), "float32"), True),
                    PackEvents(Maps(24, 20, (3, 3), (180, 1, 60, 20), "float16"), False)],
    "scan_pixels": [Maps(3, 20, (11, 13), (2860, 143, 13, 1), "float32"),
                    Maps(1, 500, (7,), (3500, 1, 500), "float16")],
    "list_rows": [ListRows(_conv()), ListRows(_conv1d(1))],
    "cast": [Cast(1, 0, False, "float32"), Cast(4097, 1, True, "bfloat16")],
    "cast_strided": [CastStrided(Maps(3, 20, (11, 13), (2860, 143, 13, 1), "float32")),
                     CastStrided(Maps(1, 5, (7,), (35, 1, 5), "float16"))],
    "lif": [Lif(77, 77, 77, 5, 7, 1, 1e-5, 2.0, 1.0, 0.0, 3, "lif", True, True, True, True, True, True),
            Lif(1, 1, 1, 1, 1, 0, 1e-5, 2.0, 1.0, 0.0, 1, "if", False, False, False, False, False, False)],
    "conv_lif": [
        conv_lif_problem(_conv1d(2)._replace(n=6), 2, (0.1, 0.0, 1.5, 1.0, 0.0, 3, "lif", True, True) + (False,) * 4),
        conv_lif_problem(
            _conv(c=32, k=48)._replace(n=4), 3,
            (0.0, 1e-5, 2.0, 1.0, 0.25, 4, "lif", False, False, True, True, True, True), keep=False, currents=True,
        ),
        conv_lif_problem(
            _conv(c=20, k=24)._replace(n=16), 4,
            (0.0, 1e-5, 1.0, 0.5, 0.0, 16, "plif", False, False, False, True, False, False), connect="iand",
        ),
    ],
    "conv_neuron": [
        conv_neuron_problem(
            _conv(c=32, k=48)._replace(n=6, dtype="float16"), 2,
            Described(3, neuron_of("t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; spike t2; v0 t1"), "float16", 1e-5,
                      (True, *[False] * 5), (0.0, 0.5), (0.25,) * 8, (True, False), (True, *[False] * 5), True, True,
                      False), keep=False, connect="and", added="float16", currents=True,
        ),
    ],
    "neuron": [Neurons(77, 77, 77, (Axis(7, 1), *[Axis(1, 1)] * 5), (0.0, 0.5), (0.25,) * 8, 3,
                       neuron_of("t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; t3 = float t2; spike t2; v0 t1; v1 t3"),
                       (True, False), (True, *[False] * 5), False)],
    "write_out": [WriteOut(90, 100, 1200, "float32", "int64"), WriteOut(1, 1, 0, "bfloat16", "int32")],
    "pack_mask": [PackMask(1), PackMask(8 * 4096 + 1)],
    "merge_pruned": [Merge(1, 1, 4), Merge(4097, 33, 2)],
    "split_pruned": [Split(1, 1, 4, 1, 0), Split(4097, 33, 2, 0, 0)],
    "selective_step": [SelectiveStep("full", 33, 4097, 0, 0, 0.9, 0.99, 0.1, 0.1, 1e-8, 0.1, *STEP)],
    "select_largest": [SelectLargest(1, "float32", "int32"), SelectLargest(2**20 + 1, "bfloat16", "int64")],
}  # fmt: skip


def cases() -> Iterator[tuple[str, int]]:
    return ((op, which) for op, problems in PROBLEMS.items() for which in range(len(problems)))


def found(op: str, which: int) -> dict[str, Any]:
    """By template: how many configurations, and what the middle ones launch; or why none."""
    answer: dict[str, Any] = {}
    problem = PROBLEMS[op][which]
    for device in (H100, A100):  # the newer one's kernels do not run on the other, where older ones take over
        candidates = all_operations()[op].candidates(problem, device)
        answer = all_operations()[op].refusals(problem, device) | answer
        for name, group in itertools.groupby(candidates, key=lambda candidate: candidate.template.name):
            every = list(group)
            if not isinstance(answer.get(name), list):
                answer[name] = [len(every), *_launched(every, problem)]
    return {f"{op} {which} {name}": row for name, row in answer.items()}


def _launched(candidates: list[Candidate[Any]], problem: Any) -> list[str]:
    """Of the middle candidate of those with as many launches, so that block sizes are none of the extremes."""
    texts: dict[int, list[str]] = {}
    for candidate in candidates:
        parts = _parts(candidate.template.prepare(problem, candidate.config))
        texts.setdefault(len(parts), []).append(f"{candidate.config}: " + "; ".join(parts))
    return [same[len(same) // 2] for same in texts.values()]


def _parts(prepared: Any) -> list[str]:
    """The launches and workspaces of what a template prepared."""
    if isinstance(prepared, Launch):
        return [f"{prepared.kernel.__name__} {list(prepared.grid)} {list(prepared.numbers)} {prepared.named}"]
    if not isinstance(prepared, Launches):
        return [type(prepared).__name__]
    spaces = [f"{list(shape)} {dtype}" for shape, _, dtype in prepared.workspaces]
    return [*spaces, *(f"{_parts(step.launch)[0]} of {step.takes}" for step in prepared.steps)]


@pytest.mark.parametrize(("op", "which"), list(cases()))
def test_launches_are_those_of_the_table(op: str, which: int) -> None:
    written = {name: row for name, row in json.loads(TABLE.read_text()).items() if name.startswith(f"{op} {which} ")}
    assert found(op, which) == written


def main() -> int:
    rows = {name: row for op, which in cases() for name, row in found(op, which).items()}
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
