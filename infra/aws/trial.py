"""The trial of a deployed stack: a real job through the queue, for which the pool starts a worker
if there is none. So an image or a model that cannot start is noticed now.

    scripts/trial [--region R] [--profile P] [--stack-name NAME]

Python's own library is enough: the scripts run beside `sam`, without batchway's packages.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from infra.aws.installation import Installation, run_script
from infra.aws.parameters import DeployError
from infra.pool import START_LIMIT_S

TRIAL_S = START_LIMIT_S + 600.0
_EVERY_S = 10.0
_TIMEOUT_S = 30.0
_TEXT = "Count to 3."
_UNKNOWN = "/v1/completions"  # until a worker has announced what its model answers
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": _TEXT}], "max_tokens": 8},
    "/v1/completions": {"prompt": _TEXT, "max_tokens": 8},
    "/v1/embeddings": {"input": _TEXT},
    "/v1/rerank": {"query": _TEXT, "documents": [_TEXT]},
    "/v1/score": {"text_1": _TEXT, "text_2": _TEXT},
    "/v1/classify": {"input": _TEXT},
}
_PAIRS = {"input": [[_TEXT, _TEXT]]}  # which some classifiers take alone

Ask = Callable[[str, str, Mapping[str, Any] | None], tuple[int, dict[str, Any]]]
"""Sends a request: method, path, body. Returns status and body; 0 and an error without answer."""


class Trial:
    """One trial. `has_failed` says whether a worker has ended instead of starting."""

    def __init__(
        self,
        ask: Ask,
        model: str,
        lane: str,
        has_failed: Callable[[], bool],
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ask = ask
        self._model = model
        self._lane = lane
        self._has_failed = has_failed
        self._clock_s = clock_s
        self._sleep = sleep

    def run(self) -> None:
        """Returns when the job has succeeded. Raises DeployError, and what boto3 raises."""
        end_s, job_id = self._clock_s() + TRIAL_S, ""
        while self._clock_s() < end_s:
            if job_id:
                if self._has_succeeded(job_id):
                    return
            else:
                job_id = self._submitted(end_s - self._clock_s())
            self._sleep(_EVERY_S)
        raise DeployError(f"no answer of {self._model!r} within {TRIAL_S / 60:.0f} minutes")

    def _submitted(self, deadline_s: float) -> str:
        """The id of the job; '' while no worker has announced the model."""
        _, shown = self._ask("GET", f"/v1/models/{self._model}", None)
        known = [path for path in shown.get("endpoints", ()) if path in BODIES]
        endpoint = known[0] if known else _UNKNOWN
        asked = {"endpoint": endpoint, "lane": self._lane, "deadline_s": deadline_s}
        for fields in (BODIES[endpoint], _PAIRS):
            body = {"model": self._model, **fields}
            status, answer = self._ask("POST", "/v1/jobs", {**asked, "body": body})
            if status != 400 or endpoint != "/v1/classify":
                break
        if status == 202:
            print(f"trial job {answer['id']}: accepted", flush=True)
            return str(answer["id"])
        error = answer.get("error", {})  # none of API Gateway, which may not know the stage yet
        message = f"{error.get('code')}: {error.get('message')}"
        is_wrong = 400 <= status < 500 and status != 429
        if error and (is_wrong or error.get("code") == "model_failed"):
            raise DeployError(f"the trial job was refused: {message}")
        self._wait(message)
        return ""

    def _has_succeeded(self, job_id: str) -> bool:
        _, job = self._ask("GET", f"/v1/jobs/{job_id}", None)
        status = job.get("status", "unknown")
        if status == "succeeded":
            return True
        if status in ("failed", "cancelled", "expired"):
            code = (job.get("error") or {}).get("code")
            raise DeployError(f"the trial job {job_id} has {status}: {code}")
        if job.get("waiting_for") == "worker":
            expected_s = job.get("expected_start_s")
            when = "" if expected_s is None else f", expected in {expected_s:.0f} s"
            self._wait(f"it waits for a worker{when}")
            self._check_model()
        return False

    def _wait(self, why: str) -> None:
        print(f"trial job: {why}", flush=True)
        if self._has_failed():
            raise DeployError("a worker ended before it was ready: its log says why")

    def _check_model(self) -> None:
        _, shown = self._ask("GET", f"/v1/models/{self._model}", None)
        if failed := shown.get("failed"):
            raise DeployError(f"the model {self._model!r} has failed: {failed['reason']}")


def asker(url: str, key: str) -> Ask:
    """Asks over HTTP, with an API key."""

    def ask(
        method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310
            url + path, data=data, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                return answer.status, _object(answer.read())
        except urllib.error.HTTPError as exc:
            return exc.code, _object(exc.read())
        except OSError as exc:
            return 0, {"error": {"code": "no_answer", "message": type(exc).__name__}}

    return ask


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def failures_of(client: Any, cluster: str, service: str) -> Callable[[], bool]:
    """Whether a task of the service's deployment has failed since now. Machines of one's own are
    no service."""

    def num_failed() -> int:
        services = client.describe_services(cluster=cluster, services=[service])["services"]
        found = [deployment for one in services for deployment in one["deployments"]]
        return sum(d.get("failedTasks", 0) for d in found if d["status"] == "PRIMARY")

    before = num_failed()
    return lambda: num_failed() > before


def try_stack(one: Installation) -> int:
    """Raises DeployError, and what boto3 raises."""
    if (stack := one.described(one.stack)) is None:
        raise DeployError(f"no stack {one.stack} in {one.session.region_name}: check --stack-name")
    found = {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
    given = {each["ParameterKey"]: each["ParameterValue"] for each in stack["Parameters"]}
    secret = one.client("secretsmanager").get_secret_value(SecretId=found["ApiKeySecretArn"])
    [key] = json.loads(secret["SecretString"]).values()
    has_failed = failures_of(one.client("ecs"), found["ClusterName"], f"{one.stack}-worker")
    lane = given["Lanes"].partition(",")[0]
    Trial(asker(found["Url"], key), given["ServedModelName"], lane, has_failed).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_script(try_stack))
