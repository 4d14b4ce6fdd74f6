"""What tuning leaves behind, and its JSON form, which is read as strictly as anything from a stranger.

An entry belongs to one signature and holds what became of each candidate; a fact is a measurement of the card itself.
The same checks stand between files, databases, other processes and a live cache.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from sparsecomp.errors import CacheError
from sparsecomp.files import json_text
from sparsecomp.lowering.cache.signature import Device

KIND = "sparsecomp tuning results"
VERSION = 1
"""Of the JSON form; another version is not read."""

MAX_BYTES = 512 << 20
"""Of a file that is read."""

_MAX_TEXT = 1000
_MAX_CANDIDATES = 10_000
_MAX_FIELDS = 200
_MAX_FACTS = 10_000
_LARGEST = 1e300
_REQUIRED = {"op", "gpu", "capability", "triton"}
_FIELD = re.compile(r"[a-z_]{1,40}|(size|parameter)\.\w{1,80}", re.ASCII)


@dataclass(frozen=True)
class Entry:
    """What is known for one kernel signature.

    Attributes:
        fields: the signature's fields as text.
        times: milliseconds by candidate's name.
        verified: candidates whose results the reference confirmed.
        rejected: why a candidate must not be used, by name.
        postponed: the effort whose time budget ended before a candidate was timed, by name.
    """

    fields: Mapping[str, str]
    times: Mapping[str, float] = field(default_factory=dict)
    verified: frozenset[str] = frozenset()
    rejected: Mapping[str, str] = field(default_factory=dict)
    postponed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """As `KernelSignature.key`."""
        return compact(dict(sorted(self.fields.items())))

    @cached_property
    def best(self) -> str | None:
        """The fastest verified candidate that has a time, None if there is none."""
        usable = self.verified & self.times.keys()
        return min(usable, key=lambda name: (self.times[name], name), default=None)

    @property
    def device(self) -> Device:
        """Where it was measured."""
        return Device(self.fields["gpu"], self.fields["capability"], self.fields["triton"])

    def updated(self, newer: "Entry") -> "Entry":
        """This entry with `newer`'s results, whose word on a candidate is the last."""
        times = _last({name: ms for name, ms in self.times.items() if name not in newer.times} | dict(newer.times))
        rejected = {name: why for name, why in self.rejected.items() if name not in newer.verified}
        rejected = _last(rejected | dict(newer.rejected))
        verified = (self.verified | newer.verified) - rejected.keys()
        if len(verified) > _MAX_CANDIDATES:
            verified &= times.keys()
        known = times.keys() | verified | rejected.keys()
        waiting = dict(self.postponed) | dict(newer.postponed)
        postponed = {name: effort for name, effort in waiting.items() if name not in known}
        return Entry(self.fields, times, verified, rejected, _last(postponed))

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON values."""
        return {"fields": dict(self.fields), **self.results()}

    def results(self) -> dict[str, Any]:
        """As :meth:`to_json`, without the fields."""
        return {
            "times": dict(self.times), "verified": sorted(self.verified), "rejected": dict(self.rejected),
            "postponed": dict(self.postponed),
        }  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """Numbers measured on a card, such as its ceilings."""

    name: str
    device: Device
    values: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """The fact as JSON values."""
        return {"name": self.name, "device": asdict(self.device), "values": dict(self.values)}


class Document(NamedTuple):
    """What a file of tuning results holds."""

    entries: list[Entry]
    facts: list[Fact]


def dump(entries: Iterable[Entry], facts: Iterable[Fact]) -> Iterator[str]:
    """The JSON text in pieces, an entry or fact a line."""
    yield f'{{"kind": {json.dumps(KIND)}, "version": {VERSION},\n "facts": ['
    yield from _lines(facts)
    yield '],\n "entries": ['
    yield from _lines(entries)
    yield "]}\n"


def _lines(items: Iterable[Entry | Fact]) -> Iterator[str]:
    for number, item in enumerate(items):
        yield f"{',' if number else ''}\n  {compact(item.to_json())}"


compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""A value as JSON in one line."""


def parse(text: str | bytes) -> Document:
    """What :func:`dump` wrote.

    Raises:
        CacheError: anything else, down to one value out of its domain.
    """
    if len(text) > MAX_BYTES:
        raise CacheError(f"{len(text)} bytes of tuning results: at most {MAX_BYTES} are read")
    root = json_values(text, object_pairs_hook=_object)
    if not isinstance(root, dict) or root.get("kind") != KIND:
        raise CacheError(f"this is no file of tuning results: its kind must be {KIND!r}")
    if root.get("version") != VERSION or isinstance(root["version"], bool):
        raise CacheError(f"tuning results of version {root.get('version')!r}: this sparsecomp reads {VERSION}")
    _keys(root, {"kind", "version", "entries", "facts"}, "the file")
    entries = [entry_of(raw, f"entry {number}") for number, raw in enumerate(_list(root["entries"], "entries"))]
    facts = [_fact_of(raw, f"fact {number}") for number, raw in enumerate(_list(root["facts"], "facts", _MAX_FACTS))]
    _no_twins([entry.key for entry in entries], "entries of one signature")
    _no_twins([str((fact.name, fact.device)) for fact in facts], "facts of one name and device")
    return Document(entries, facts)


def json_values(text: str | bytes, **hooks: Any) -> Any:
    """As `json_text.loads`.

    Raises:
        CacheError: this is no JSON, or nested too deep.
    """
    try:
        return json_text.loads(text, **hooks)
    except ValueError as error:
        raise CacheError(f"this is no JSON of tuning results: {error}") from None


def entry_of(raw: Any, where: str) -> Entry:
    """An entry from JSON values.

    Raises:
        CacheError: a value out of its domain, at `where`.
    """
    _keys(raw, {"fields", "times", "verified", "rejected", "postponed"}, where)
    entry = Entry(
        _fields(raw["fields"], where),
        _numbers(raw["times"], f"{where}, times"),
        frozenset(_names(raw["verified"], f"{where}, verified")),
        _texts(raw["rejected"], f"{where}, rejected"),
        _texts(raw["postponed"], f"{where}, postponed"),
    )
    both = entry.verified & entry.rejected.keys()
    if both:
        raise CacheError(f"{where}: {sorted(both)[0]!r} is both verified and rejected")
    return entry


def fact(name: str, device: Device, values: Mapping[str, float]) -> Fact:
    """A checked fact.

    Raises:
        CacheError: a value is not finite and positive, or a text is too long.
    """
    return _fact_of(Fact(name, device, values).to_json(), f"fact {name!r}")


def _fact_of(raw: Any, where: str) -> Fact:
    _keys(raw, {"name", "device", "values"}, where)
    _keys(raw["device"], {"name", "capability", "triton"}, f"{where}, device")
    device = Device(**_texts(raw["device"], f"{where}, device"))
    (name,) = _printable([raw["name"]], f"{where}, name")
    return Fact(name, device, _numbers(raw["values"], f"{where}, values"))


def sentence(text: str) -> str:
    """`text` as one printable line of bounded length."""
    line = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 1]}…"


def _last(results: dict[str, Any]) -> dict[str, Any]:
    """The newest of too many: kernels change, and results of old ones are not asked for again."""
    return results if len(results) <= _MAX_CANDIDATES else dict(list(results.items())[-_MAX_CANDIDATES:])


def _fields(raw: object, where: str) -> dict[str, str]:
    found = _texts(raw, f"{where}, fields", _MAX_FIELDS)
    fault = _fault_of_names(tuple(found))
    if fault is not None:
        raise CacheError(f"{where}: {fault}")
    return found


@lru_cache(maxsize=1024)
def _fault_of_names(names: tuple[str, ...]) -> str | None:
    """What is wrong with a signature's field names, of which there are few sets."""
    missing = _REQUIRED.difference(names)
    if missing:
        return f"the field {min(missing)!r} is missing"
    strange = [name for name in names if not _FIELD.fullmatch(name)]
    return f"{strange[0]!r} is no name of a signature's field" if strange else None


def _texts(raw: object, where: str, most: int = _MAX_CANDIDATES) -> dict[str, str]:
    found = _mapping(raw, where, most)
    _printable(list(found.values()), where)
    return found


def _numbers(raw: object, where: str) -> dict[str, float]:
    return {name: _positive(value, where) for name, value in _mapping(raw, where, _MAX_CANDIDATES).items()}


def _mapping(raw: object, where: str, most: int) -> dict[str, Any]:
    if not isinstance(raw, dict) or len(raw) > most:
        raise CacheError(f"{where}: needs an object of at most {most} values")
    _printable(list(raw), where)
    return raw


def _names(raw: object, where: str) -> list[str]:
    names = _printable(_list(raw, where, _MAX_CANDIDATES), where)
    _no_twins(names, where)
    return names


def _list(raw: object, where: str, most: int = 10**7) -> list[Any]:
    if not isinstance(raw, list) or len(raw) > most:
        raise CacheError(f"{where}: needs a list of at most {most} values")
    return raw


def _printable(raw: list[Any], where: str) -> list[str]:
    """Checks all texts at once: there are millions in a large file."""
    try:
        whole = "".join(raw)
        good = whole.isprintable() and (len(whole) <= _MAX_TEXT or max(map(len, raw)) <= _MAX_TEXT)
    except TypeError:
        good = False
    if not good:
        raise CacheError(f"{where}: {_shown(raw)} is no printable text of at most {_MAX_TEXT} letters")
    return raw


def _positive(raw: object, where: str) -> float:
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not 0 < raw <= _LARGEST:
        raise CacheError(f"{where}: {_shown(raw)} is no finite positive number")
    return float(raw)


def _keys(raw: Any, needed: set[str], where: str) -> None:
    if not isinstance(raw, dict) or raw.keys() != needed:
        raise CacheError(f"{where}: needs an object with exactly {', '.join(sorted(needed))}; got {_shown(raw)}")


def _no_twins(names: list[str], where: str) -> None:
    if len(set(names)) < len(names):
        raise CacheError(f"{where}: something occurs twice")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def _shown(raw: object) -> str:
    text = repr(sorted(raw)) if isinstance(raw, dict) and all(isinstance(name, str) for name in raw) else repr(raw)
    return text if len(text) <= 80 else f"{text[:79]}…"
