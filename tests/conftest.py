"""Triton reads TRITON_INTERPRET when it is imported, so it is set before anything else.

Tests keep their tuning results to themselves: what a user's cache holds must not decide what they run.
"""

import os
import tempfile

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_cache = tempfile.TemporaryDirectory(prefix="sparsecomp-tests-", ignore_cleanup_errors=True)
os.environ["SPARSECOMP_CACHE_DIR"] = _cache.name


@pytest.fixture
def one_thread():
    """Small tensors on one thread: where other processes hold the cores, threads wait for one another at each step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
