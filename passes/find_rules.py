"""Every rewrite rule, found in the rooms as kernel templates are, in the order that the rules themselves ask for."""

from collections.abc import Iterable

import networkx

from sparsecomp.discovery import instances, modules_within
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import Rule


def in_order(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Each rule after those that it names, else by name."""
    by_name = {rule.name: rule for rule in rules}
    order = networkx.DiGraph([(before, rule.name) for rule in by_name.values() for before in rule.after])
    order.add_nodes_from(by_name)
    return tuple(by_name[name] for name in networkx.lexicographical_topological_sort(order))


_PASSES = "sparsecomp.passes"
_IN_ROOMS = [name for name in modules_within(_PASSES) if "." in name.removeprefix(f"{_PASSES}.")]
RULES = in_order(instances(Rule, _IN_ROOMS))


def enabled(options: Options) -> tuple[Rule, ...]:
    """The rules that these options leave on."""
    return tuple(rule for rule in RULES if not {rule.name, "all"} & set(options.disable))
