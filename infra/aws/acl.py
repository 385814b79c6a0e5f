"""Writes the rights of the cache's users into the template: python -m infra.aws.acl

They are those of infra/redis_roles.py, with the stack's namespace; a test compares them.
"""

import re
import sys
import textwrap
from pathlib import Path

from infra.redis_roles import REDIS_ROLES, acl_rules

_TEMPLATE = Path(__file__).parents[2] / "template.yaml"
_USER = re.compile(r"(UserName: (\w+)\n(?: +.*\n)*? +AccessString: !Sub >-\n)((?: {8}.*\n)+)")
_NAMESPACE = "NAMESPACE"
_INDENT = " " * 8


def with_rights(template: str) -> str:
    """The template with the rights of each of its users."""

    def user(found: re.Match[str]) -> str:
        rules = " ".join(acl_rules(REDIS_ROLES[found[2]], _NAMESPACE))
        rules = rules.replace(f":{_NAMESPACE}:", ":${Namespace}:")
        lines = textwrap.wrap(rules, 92, break_long_words=False, break_on_hyphens=False)
        return found[1] + "".join(f"{_INDENT}{line}\n" for line in lines)

    return _USER.sub(user, template)


def main() -> int:
    _TEMPLATE.write_text(with_rights(_TEMPLATE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
