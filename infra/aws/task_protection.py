"""Protects an ECS task with jobs from being ended, through the ECS agent."""

import http.client
import json
import logging
from dataclasses import dataclass
from urllib.parse import urlsplit

log = logging.getLogger("batchway.protection")

EXPIRES_MINUTES = 15  # renewed every RENEW_S; ends the protection of a worker that crashed
RENEW_S = 300.0
IDLE_S = 10.0  # protection ends after this time without jobs
_TIMEOUT_S = 2.0


@dataclass(slots=True)
class TaskProtection:
    """`agent_url` is the value of ECS_AGENT_URI. Reports changes, and renews protection."""

    agent_url: str
    _is_on: bool = False
    _reported_s: float = 0.0
    _busy_s: float = 0.0

    def note(self, num_jobs: int, now_s: float) -> None:
        """Reports the number of jobs; repeats it if the agent did not answer."""
        if num_jobs:
            self._busy_s = now_s
            if not self._is_on or now_s - self._reported_s > RENEW_S:
                self._report(True, now_s)
        elif self._is_on and now_s - self._busy_s >= IDLE_S:
            self._report(False, now_s)

    def _report(self, is_on: bool, now_s: float) -> None:
        body: dict[str, object] = {"ProtectionEnabled": is_on}
        if is_on:
            body["ExpiresInMinutes"] = EXPIRES_MINUTES
        try:
            status = self._put(json.dumps(body))
        except (OSError, http.client.HTTPException) as exc:
            log.warning("ECS agent not reached: %s", type(exc).__name__)
            return
        if status != 200:
            log.warning("ECS agent returned status %d", status)
            return
        self._is_on, self._reported_s = is_on, now_s

    def _put(self, body: str) -> int:
        url = urlsplit(self.agent_url)
        connection = http.client.HTTPConnection(url.netloc, timeout=_TIMEOUT_S)
        try:
            headers = {"content-type": "application/json"}
            connection.request("PUT", f"{url.path}/task-protection/v1/state", body, headers)
            return connection.getresponse().status
        finally:
            connection.close()
