"""Answers in JSON, and the one that hands a job over to its caller."""

from collections.abc import Mapping

from starlette.responses import Response

from gateway.http import sse


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        sse.encode_json(content), status, headers=headers, media_type="application/json"
    )


def accepted_response(shown: Mapping[str, object], headers: Mapping[str, str]) -> Response:
    """202: `shown` is the job, to be looked for where `location` says."""
    job_id = str(shown["id"])
    own = {"x-job-id": job_id, "location": f"/v1/jobs/{job_id}"}
    return json_response(shown, status=202, headers={**headers, **own})
