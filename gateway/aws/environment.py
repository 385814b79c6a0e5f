"""Settings on Lambda: variables of the function, and secrets from Secrets Manager.

A function's variables are visible to everyone who may read its configuration, so they contain only
the names of secrets: BATCHWAY_SECRET_ARNS, separated by commas. Each secret is a JSON object with
names of variables as keys, such as BATCHWAY_API_KEY and REDIS_PASSWORD.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from contract.connection import redis_url_of
from contract.errors import BatchwayError
from gateway.settings import GatewaySettings, variable

SECRETS_VARIABLE = "BATCHWAY_SECRET_ARNS"
SETTINGS_VARIABLE = "BATCHWAY_SETTINGS"
TIMEOUT_S = 5.0


class SecretUnavailable(BatchwayError):
    """A secret could not be read. The message never contains its value."""


def load_settings() -> GatewaySettings:
    """Raises SecretUnavailable, ValueError."""
    # API Gateway checks no key, and no Prometheus scrapes a function.
    known = {"BATCHWAY_REQUIRE_KEY": "1", "BATCHWAY_EMBEDDED_METRICS": "1", **os.environ}
    known |= operators_settings(os.environ)
    known["BATCHWAY_CONSOLE"] = "0"  # a page that watches would hold a function
    # Lambda stops a function between its invocations.
    known["BATCHWAY_FEEDS_BATCHES"] = known["BATCHWAY_WARMS_NEXT_TURN"] = "0"
    if arns := known.get(SECRETS_VARIABLE):
        known |= read_secrets([arn.strip() for arn in arns.split(",")])
    if url := redis_url_of(known):
        known["REDIS_URL"] = url
    names = {name: variable(name) for name in GatewaySettings.model_fields}
    given = {name: known[names[name]] for name in names if known.get(names[name])}
    return GatewaySettings.from_env(**given)


def operators_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that the stack's parameter GatewaySettings names, with their values. Raises
    ValueError for a word that is none."""
    words = environ.get(SETTINGS_VARIABLE, "").split()
    known = {variable(name) for name in GatewaySettings.model_fields}
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{SETTINGS_VARIABLE}: no setting {name!r}: see docs/options.md")
    return dict(word.split("=", 1) for word in words)


def read_secrets(arns: list[str]) -> dict[str, str]:
    """Returns the entries of all these secrets. Raises SecretUnavailable."""
    from botocore.exceptions import BotoCoreError, ClientError

    client = aws_client("secretsmanager")
    entries: dict[str, str] = {}
    for arn in arns:
        try:
            text = client.get_secret_value(SecretId=arn)["SecretString"]
        except (BotoCoreError, ClientError) as exc:
            raise SecretUnavailable(f"{arn}: {exc}") from exc
        try:
            entries |= msgspec.json.decode(text, type=dict[str, str])
        except msgspec.DecodeError as exc:
            raise SecretUnavailable(f"{arn}: not a JSON object of strings") from exc
    return entries


def aws_client(service: str) -> Any:
    """A client of boto3, which comes with Lambda's Python. It is imported here because that takes
    0.2 s of processor time."""
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S)
    return boto3.session.Session().client(service, config=config)
