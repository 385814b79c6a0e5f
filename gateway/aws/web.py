"""Runs the gateway behind the Lambda Web Adapter: `python -m gateway.aws.web`.

The adapter polls AWS_LWA_PORT on loopback until uvicorn answers, then forwards requests.
"""

import logging
import os

from gateway.aws.environment import load_settings
from gateway.server import serve

DEFAULT_PORT = 8080

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    serve(load_settings(), "127.0.0.1", int(os.environ.get("AWS_LWA_PORT", DEFAULT_PORT)))
