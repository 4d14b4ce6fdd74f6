"""The environment variables, read in one place and strictly: a misspelt value must not pass for a default.

Each field of :class:`Settings` carries its variable's name, values and meaning; the README's table is made from them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from platformdirs import user_cache_dir

from sparsecomp.errors import OptionError

Effort = Literal["none", "quick", "full"]

_PLACES = ("HOME", "XDG_CACHE_HOME")
"""What the default directory follows beside our own variables."""


def _variable(name: str, values: str, meaning: str, parse: Callable[[str], Any], default: Callable[[], Any]) -> Any:
    metadata = {"variable": name, "values": values, "meaning": meaning, "parse": parse}
    return field(default_factory=default, metadata=metadata)


def _directory(text: str) -> Path:
    if not text:
        raise ValueError("it is empty")
    return Path(text).expanduser().absolute()


def _default_directory() -> Path | None:
    try:
        found = Path(user_cache_dir("sparsecomp"))
    except RuntimeError:  # there is no home directory; older platformdirs leave the "~" in the path
        return None
    return found if found.is_absolute() else None


def _effort(text: str) -> Effort:
    if text not in get_args(Effort):
        raise ValueError("it is none of them")
    return cast(Effort, text)


def check_effort(effort: object) -> None:
    """Refuse an effort that there is not.

    Raises:
        OptionError: it is none of `Effort`.
    """
    if not isinstance(effort, str) or effort not in get_args(Effort):
        raise OptionError(f"effort={effort!r}: use one of {', '.join(map(repr, get_args(Effort)))}")


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it is neither")
    return text == "1"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    if "" in names:
        raise ValueError("a name is empty")
    return names


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for.

    Attributes:
        cache_dir: directory of the tuning results, absolute; None where there is no home directory to put it in.
        autotune: how much to measure; None leaves it to torch.compile's mode.
        force_autotune: measure again what the cache already knows.
        disable_passes: names of rules not to run; `sparsecomp.options.RULES` lists them.
        debug: check the graph after each rule, and that weights which are promised to be frozen are.
    """

    cache_dir: Path | None = _variable(
        "SPARSECOMP_CACHE_DIR",
        "a directory",
        "where tuning results are kept; by default `sparsecomp` in the user's cache directory",
        _directory,
        _default_directory,
    )
    autotune: Effort | None = _variable(
        "SPARSECOMP_AUTOTUNE",
        "`none`, `quick`, `full`",
        "how many candidates are measured; by default torch.compile's mode decides",
        _effort,
        lambda: None,
    )
    force_autotune: bool = _variable(
        "SPARSECOMP_FORCE_AUTOTUNE", "`0`, `1`", "`1` measures again what the cache already knows", _flag, bool
    )
    disable_passes: tuple[str, ...] = _variable(
        "SPARSECOMP_DISABLE_PASSES", "`all`, or rules separated by commas", "rules not to run", _names, tuple
    )
    debug: bool = _variable(
        "SPARSECOMP_DEBUG", "`0`, `1`", "`1` turns `verify` on and checks what `frozen` promises", _flag, bool
    )

    @classmethod
    def from_environment(cls) -> "Settings":
        """The settings as the environment stands now; the same text is parsed once.

        Raises:
            OptionError: a variable has a value outside its domain.
        """
        return _parsed(tuple(map(os.environ.get, _NAMES)))


_NAMES = (*(item.metadata["variable"] for item in fields(Settings)), *_PLACES)


@lru_cache(maxsize=64)
def _parsed(texts: tuple[str | None, ...]) -> Settings:
    given = zip(fields(Settings), texts, strict=False)
    return Settings(**{item.name: _value(item.metadata, text) for item, text in given if text is not None})


def _value(metadata: Any, text: str) -> Any:
    try:
        return metadata["parse"](text)
    except (ValueError, RuntimeError) as error:
        needed = metadata["values"].replace("`", "")
        raise OptionError(f"{metadata['variable']}={text!r}: {error}; use {needed}") from None


def markdown() -> str:
    """The table of the environment variables, as in the README."""
    rows = [
        (f"`{item.metadata['variable']}`", item.metadata["values"], item.metadata["meaning"])
        for item in fields(Settings)
    ]
    head = ("environment variable", "values", "meaning")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, *rows)).replace("\n", "\n|---|---|---|\n", 1)
