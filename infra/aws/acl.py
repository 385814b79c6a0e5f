"""Writes the rights of the cache's users into data.yaml: python -m infra.aws.acl

They are those of infra/redis_roles.py, with the namespace `default`; what users share is written
once. A test compares them.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from infra.redis_roles import REDIS_ROLES, acl_rules

TEMPLATE = Path(__file__).with_name("data.yaml")
_ENTRY = re.compile(r"( {4}(\w+):\n(?: {6}.*\n)* {6}Rights: >-\n)((?: {8}.*\n)+)")
_NAMESPACE = "default"
_INDENT = " " * 8
_SHARED = {
    "Jobs": ("gateway", "worker", "flows", "housekeeper", "operator"),
    "Others": ("callbacks", "pool"),
}


def _rights() -> Iterator[tuple[str, list[str]]]:
    """What users share, and the rest of each one, by entry of the template."""
    for entry, names in _SHARED.items():
        rules = {name: acl_rules(REDIS_ROLES[name], _NAMESPACE) for name in names}
        first, *others = rules.values()
        shared = [rule for rule in first if all(rule in each for each in others)]
        yield entry, shared
        for name, own in rules.items():
            yield name.title(), [rule for rule in own if rule not in shared]


def with_rights(template: str) -> str:
    """The template with the rights of its users."""
    rights = dict(_rights())

    def entry(found: re.Match[str]) -> str:
        rules = " ".join(rights[found[2]])
        lines = textwrap.wrap(rules, 92, break_long_words=False, break_on_hyphens=False)
        return found[1] + "".join(f"{_INDENT}{line}\n" for line in lines)

    return _ENTRY.sub(entry, template)


if __name__ == "__main__":
    TEMPLATE.write_text(with_rights(TEMPLATE.read_text()))
