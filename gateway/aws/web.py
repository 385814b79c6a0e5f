"""The gateway behind the Lambda Web Adapter: uvicorn on loopback, settings as on Lambda.

`python -m gateway.aws.web`; the adapter asks AWS_LWA_PORT until it answers, then passes requests.
"""

import logging
import os

from gateway.aws.environment import load_settings
from gateway.http.server import serve

DEFAULT_PORT = 8080

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    serve(load_settings(), "127.0.0.1", int(os.environ.get("AWS_LWA_PORT", DEFAULT_PORT)))
