"""Writes the rights of the cache's users into data.yaml: python -m infra.aws.acl

They are those of infra/redis_roles.py, with the namespace `default`; a test compares them.
"""

import re
import textwrap
from pathlib import Path

from infra.redis_roles import REDIS_ROLES, acl_rules

TEMPLATE = Path(__file__).with_name("data.yaml")
_USER = re.compile(r"(UserName: (\w+)\n(?: +.*\n)*? +AccessString: >-\n)((?: {8}.*\n)+)")
_NAMESPACE = "default"
_INDENT = " " * 8


def with_rights(template: str) -> str:
    """The template with the rights of each of its users."""

    def user(found: re.Match[str]) -> str:
        rules = " ".join(acl_rules(REDIS_ROLES[found[2]], _NAMESPACE))
        lines = textwrap.wrap(rules, 92, break_long_words=False, break_on_hyphens=False)
        return found[1] + "".join(f"{_INDENT}{line}\n" for line in lines)

    return _USER.sub(user, template)


if __name__ == "__main__":
    TEMPLATE.write_text(with_rights(TEMPLATE.read_text()))
