"""The settings of a gateway on Lambda: plain ones from variables, secret ones from Secrets Manager.

A function's variables can be read by whoever may look at its configuration, so they hold the names
of secrets only: BATCHWAY_SECRET_ARNS, separated by commas. Each secret is a JSON object whose keys
are names of variables, such as BATCHWAY_API_KEY and REDIS_PASSWORD.
"""

import os
from typing import Any

import msgspec

from contract.errors import BatchwayError
from contract.redis_url import redis_url_of
from gateway.settings import GatewaySettings, variable

SECRETS_VARIABLE = "BATCHWAY_SECRET_ARNS"
TIMEOUT_S = 5.0


class SecretUnavailable(BatchwayError):
    """Secrets Manager did not give the secret; the message says why, never what is in it."""


def load_settings() -> GatewaySettings:
    """Raises SecretUnavailable, ValueError."""
    # API Gateway lets anybody through; no Prometheus asks a function.
    known = {"BATCHWAY_REQUIRE_KEY": "1", "BATCHWAY_EMBEDDED_METRICS": "1", **os.environ}
    if arns := known.get(SECRETS_VARIABLE):
        known |= read_secrets([arn.strip() for arn in arns.split(",")])
    if url := redis_url_of(known):
        known["REDIS_URL"] = url
    names = {name: variable(name) for name in GatewaySettings.model_fields}
    given = {name: known[names[name]] for name in names if known.get(names[name])}
    return GatewaySettings.from_env(**given)


def read_secrets(arns: list[str]) -> dict[str, str]:
    """The entries of all these secrets. Raises SecretUnavailable.

    Lambda's Python brings boto3. It is imported here because it takes 0.2 s of processor time.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S)
    client: Any = boto3.client("secretsmanager", config=config)
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
