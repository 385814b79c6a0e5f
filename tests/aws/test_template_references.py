"""References in template.yaml: what is there never refers to what a condition has left out."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

from tests.aws.template import as_list, transformed

Guard = tuple[str, bool]  # a condition, and whether it holds
_SAMPLES = ("", "x", "0", "1", "yes", "no")


def guarded_names(value: Any, guards: frozenset[Guard]) -> Iterator[tuple[str, frozenset[Guard]]]:
    """Every name that Ref, GetAtt, Sub or DependsOn mentions, with the conditions around it."""
    match value:
        case {"Fn::If": [condition, yes, no]}:
            yield from guarded_names(yes, guards | {(condition, True)})
            yield from guarded_names(no, guards | {(condition, False)})
        case {"Ref": str(name)} | {"Fn::GetAtt": [str(name), *_]}:
            yield name, guards
        case {"Fn::Sub": text_and_names}:
            text, names = (*as_list(text_and_names), {})[:2]
            for name in re.findall(r"\$\{([\w:]+)(?:\.[\w.]+)?\}", text):
                if name not in names:
                    yield name, guards
            yield from guarded_names(names, guards)
        case dict():
            for part in value.values():
                yield from guarded_names(part, guards)
        case list():
            for part in value:
                yield from guarded_names(part, guards)


def holds(condition: Any, values: dict[str, str]) -> bool:
    """What a condition is where parameters have these values."""
    match condition:
        case {"Condition": name}:
            return holds(transformed()["Conditions"][name], values)
        case {"Fn::Not": [inner]}:
            return not holds(inner, values)
        case {"Fn::And": parts}:
            return all(holds(part, values) for part in parts)
        case {"Fn::Equals": [{"Ref": name} | {"Fn::Join": [_, {"Ref": name}]}, other]}:
            return values[name] == str(other)
    raise AssertionError(condition)


def parameters_of(condition: Any) -> set[str]:
    names = {name for name, _ in guarded_names(condition, frozenset())}
    for inner in re.findall(r"'Condition': '(\w+)'", str(condition)):
        names |= parameters_of(transformed()["Conditions"][inner])
    return names


def may_be_absent(guards: frozenset[Guard], target: str) -> bool:
    """Whether some values of the parameters let the guards hold, and the target's condition not."""
    conditions = transformed()["Conditions"]
    involved = sorted(
        set().union(*(parameters_of(conditions[name]) for name in {target, *dict(guards)}))
    )
    choices = [
        [str(v) for v in transformed()["Parameters"][name].get("AllowedValues", _SAMPLES)]
        for name in involved
    ]
    for chosen in itertools.product(*choices):
        values = dict(zip(involved, chosen, strict=True))
        is_there = all(holds(conditions[name], values) == is_so for name, is_so in guards)
        if is_there and not holds(conditions[target], values):
            return True
    return False


def test_nothing_refers_to_what_a_condition_leaves_out() -> None:
    """By Ref, GetAtt, Sub or DependsOn, for all values of the parameters that decide it."""
    resources = transformed()["Resources"]
    conditional = {name: r["Condition"] for name, r in resources.items() if "Condition" in r}
    found, num_checked = set(), 0
    for name, resource in {**resources, **transformed()["Outputs"]}.items():
        own = frozenset({(resource["Condition"], True)} if "Condition" in resource else ())
        depends = [{"Ref": other} for other in as_list(resource.get("DependsOn", []))]
        for target, guards in guarded_names(
            [resource.get("Properties"), resource.get("Value"), depends], own
        ):
            if target in conditional:
                num_checked += 1
                if may_be_absent(guards, conditional[target]):
                    found.add((name, target))
    assert not found
    assert num_checked > 30
