"""Builds Triton kernels for GPUs that need not be present."""

import json
import os
import subprocess
import sys
import textwrap
from functools import cache

import pytest

_BUILDER = """
import contextlib, io, json, sys, traceback

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def build(kernel, signature, constants, capability, source=ASTSource, whole=("C", "K", "CP"), **options):
    types = {n: "constexpr" if n in constants else signature[n] for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
               if types[n].startswith("*") or n in whole}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source(kernel, types, constants, aligned), target=target, options=options)


answers = sys.stdout
for line in sys.stdin:
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(json.loads(line), {"build": build, "triton": triton, "GPUTarget": GPUTarget, "ASTSource": ASTSource})
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), file=answers, flush=True)
"""


def compile_in_subprocess(body: str) -> str:
    """Run `body` in a process without the interpreter and return what it printed.

    `body` may call `build(kernel, signature, constants, capability, source, whole, **options)`, which compiles;
    pointers, and the numbers named in `whole`, are multiples of 16.
    Triton decides at import whether it interprets, hence the process; it is one for all, since to load takes seconds.
    """
    pytest.importorskip("triton")
    builder = _builder()
    assert builder.stdin is not None and builder.stdout is not None
    try:
        print(json.dumps(textwrap.dedent(body)), file=builder.stdin, flush=True)
        answer = builder.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        _builder.cache_clear()
        pytest.fail(f"the process that compiles ended with {builder.wait()}")
    printed, error = json.loads(answer)
    assert not error, error
    return printed


@cache
def _builder() -> "subprocess.Popen[str]":
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _BUILDER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
