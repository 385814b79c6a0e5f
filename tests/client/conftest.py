"""The gateway and the fake worker of tests/gateway, for the client's tests."""

from tests.gateway.conftest import gateway_url, idle_worker, worker

__all__ = ["gateway_url", "idle_worker", "worker"]
