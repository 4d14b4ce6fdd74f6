"""Builds a Triton kernel for a GPU that need not be present."""

import os
import subprocess
import sys
import textwrap

import pytest


def compile_in_subprocess(body: str) -> str:
    """Run `body` in a fresh process without the interpreter and return what it printed.

    `body` may call `build(kernel, signature, constants, capability, source, whole, **options)`, which compiles;
    pointers, and the numbers named in `whole`, are multiples of 16.
    Triton decides at import whether it interprets, hence the process.
    """
    pytest.importorskip("triton")
    prelude = textwrap.dedent(
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        def build(kernel, signature, constants, capability, source=ASTSource, whole=("C", "K", "CP"), **options):
            types = {n: "constexpr" if n in constants else signature[n] for n in kernel.arg_names}
            aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
                       if types[n].startswith("*") or n in whole}
            target = GPUTarget("cuda", capability, 32)
            return triton.compile(source(kernel, types, constants, aligned), target=target, options=options)
        """
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + textwrap.dedent(body)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
