"""The settings of a gateway on Lambda: plain ones from variables, secret ones from the vault.

A function's variables can be read by whoever may look at its configuration, so they hold the names
of secrets only: BATCHWAY_SECRET_ARNS, separated by commas. Each secret is a JSON object whose keys
are names of variables, such as BATCHWAY_API_KEY and REDIS_PASSWORD.
"""

import os
from collections.abc import Mapping

from contract.redis_url import redis_url_of
from gateway.aws.secrets_manager import read_secret
from gateway.settings import GatewaySettings

SECRETS_VARIABLE = "BATCHWAY_SECRET_ARNS"


def load_settings(environ: Mapping[str, str] | None = None) -> GatewaySettings:
    """Raises SecretUnavailable, ValueError."""
    environ = os.environ if environ is None else environ
    # API Gateway lets anybody through; no Prometheus asks a function.
    known = {"BATCHWAY_REQUIRE_KEY": "1", "BATCHWAY_EMBEDDED_METRICS": "1", **environ}
    for arn in filter(None, environ.get(SECRETS_VARIABLE, "").split(",")):
        known |= read_secret(arn.strip(), environ)
    overrides = {} if (url := redis_url_of(known)) is None else {"redis_url": url}
    return GatewaySettings.from_env(known, **overrides)
