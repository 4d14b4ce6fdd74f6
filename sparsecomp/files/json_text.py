"""JSON from files, nested so little that what walks it afterwards, a repr in a message even, has stack enough."""

import json
from typing import Any

MOST_NESTED = 400
"""Lists and objects within one another."""


def loads(text: str | bytes, **hooks: Any) -> Any:
    """As `json.loads`.

    Raises:
        ValueError: this is no JSON, or it is nested deeper than `MOST_NESTED`.
    """
    try:
        value = json.loads(text, **hooks)
    except (RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [one for one in level if type(one) in (dict, list)]
        if not level:
            return value
        level = [part for one in level for part in (one.values() if type(one) is dict else one)]
    raise ValueError(f"it is nested more than {MOST_NESTED} deep")

