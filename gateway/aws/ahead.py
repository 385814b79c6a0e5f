"""What a first request would have to load, loaded where nobody waits for it: before a snapshot is
taken (SnapStart), or in environments that are kept ready (provisioned concurrency).
"""

import importlib
import os
from collections.abc import Mapping

_STARTED_BY = "AWS_LAMBDA_INITIALIZATION_TYPE"  # Lambda's own
_BY_A_REQUEST = "on-demand"


def load_ahead(environ: Mapping[str, str] = os.environ) -> None:
    """Nothing, where a request has started the environment and waits."""
    if environ.get(_STARTED_BY, _BY_A_REQUEST) == _BY_A_REQUEST:
        return
    importlib.import_module("tokenizers.decoders")
    importlib.import_module("boto3")  # in Lambda's Python; it reads the secrets
