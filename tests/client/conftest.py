"""The gateway and the worker of tests/gateway, for a client."""

from tests.gateway.conftest import gateway_url, idle_worker, worker

__all__ = ["gateway_url", "idle_worker", "worker"]
