"""Delivers callbacks about jobs: a relay, RQ, and delivery to a URL or into AWS."""

import os

# RQ's transactions span several keys, which a hash tag keeps in one slot of a cluster. RQ reads the
# variable when it is imported.
os.environ.setdefault("RQ_KEY_PREFIX", "{rq}")
