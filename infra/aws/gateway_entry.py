"""Entry point of a gateway's container: fetches its flows and becomes `batchway gateway`.

BATCHWAY_MODELS names the flows' file (docs/flows.md): a path, s3://BUCKET/KEY, or nothing.
"""

import os
import sys
import tempfile
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.options import MODELS_VARIABLE


def fetch_flows(client: Any, url: str, folder: Path) -> Path:
    """Downloads s3://BUCKET/KEY. Raises what boto3 raises."""
    path = folder / "models.yaml"
    client.download_file(urlsplit(url).netloc, urlsplit(url).path.strip("/"), str(path))
    return path


def prepare(environ: MutableMapping[str, str]) -> None:
    """Sets the variable to the fetched file. Raises what boto3 raises."""
    url = environ.get(MODELS_VARIABLE, "")
    if url.startswith("s3://"):
        import boto3

        folder = Path(tempfile.mkdtemp(prefix="batchway-"))
        environ[MODELS_VARIABLE] = str(fetch_flows(boto3.client("s3"), url, folder))


def main(arguments: Sequence[str]) -> None:
    prepare(os.environ)
    os.execv(sys.executable, [sys.executable, "-m", "infra", "gateway", *arguments])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
