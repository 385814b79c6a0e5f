"""`batchway redis-roles`: prints the users of Redis for an operator to make. Asks no Redis."""

import argparse

from infra import option_values
from infra.redis_roles import REDIS_ROLES, setuser_line

_TO_FILL_IN = "'>PASSWORD'"


def add_redis_roles_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace",
        type=option_values.namespace,
        default="default",
        metavar="NAME",
        help="whose keys the users may touch (default: default)",
    )


def run_redis_roles(options: argparse.Namespace) -> int:
    print("# For redis-cli, with a password of its own for each in the place of PASSWORD.")
    for name, role in REDIS_ROLES.items():
        print(f"# {name}: {role.purpose}")
        print(setuser_line(name, options.namespace, _TO_FILL_IN))
    return 0
