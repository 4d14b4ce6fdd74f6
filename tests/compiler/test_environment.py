"""A misspelt environment variable must never pass for a default."""

import os
from pathlib import Path

import pytest

from sparsecomp.environment import Settings
from sparsecomp.errors import OptionError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPARSECOMP_")]:
        monkeypatch.delenv(name)


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Settings.from_environment() == Settings(tmp_path / "sparsecomp", None, False, (), False)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("CACHE_DIR", "/data/tuning", "cache_dir", Path("/data/tuning")),
        ("CACHE_DIR", "tuning", "cache_dir", Path.cwd() / "tuning"),
        ("CACHE_DIR", "~/tuning", "cache_dir", Path.home() / "tuning"),
        ("AUTOTUNE", "none", "autotune", "none"),
        ("AUTOTUNE", "quick", "autotune", "quick"),
        ("AUTOTUNE", "full", "autotune", "full"),
        ("FORCE_AUTOTUNE", "1", "force_autotune", True),
        ("FORCE_AUTOTUNE", "0", "force_autotune", False),
        ("DISABLE_PASSES", "all", "disable_passes", ("all",)),
        ("DISABLE_PASSES", " spike_linear, spike_conv", "disable_passes", ("spike_linear", "spike_conv")),
        ("DISABLE_PASSES", "", "disable_passes", ()),
        ("DEBUG", "1", "debug", True),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, field: str, value: object) -> None:
    monkeypatch.setenv(f"SPARSECOMP_{name}", text)
    assert getattr(Settings.from_environment(), field) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("CACHE_DIR", "", "a directory"),
        ("CACHE_DIR", "~nobody-of-that-name/x", "a directory"),
        ("AUTOTUNE", "Full", "none, quick, full"),
        ("AUTOTUNE", "", "none, quick, full"),
        ("FORCE_AUTOTUNE", "yes", "0, 1"),
        ("DISABLE_PASSES", "spike_conv,", "all, or rules"),
        ("DEBUG", " 1", "0, 1"),
    ],
)
def test_a_value_outside_its_domain_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, allowed: str
) -> None:
    monkeypatch.setenv(f"SPARSECOMP_{name}", text)
    with pytest.raises(OptionError) as caught:
        Settings.from_environment()
    assert f"SPARSECOMP_{name}={text!r}" in str(caught.value) and allowed in str(caught.value)


def test_without_a_home_there_is_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # no such user
    assert Settings.from_environment().cache_dir is None


def test_a_change_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSECOMP_AUTOTUNE", "quick")
    assert Settings.from_environment().autotune == "quick"
    monkeypatch.setenv("SPARSECOMP_AUTOTUNE", "full")
    assert Settings.from_environment().autotune == "full"
