"""Events in AWS's format, as the Lambda and API Gateway developer guides document them."""

import json
from collections.abc import Mapping
from typing import Any

KEY = "k" * 32
HEADERS = {
    "Host": "abc123.execute-api.eu-central-1.amazonaws.com",
    "Authorization": f"Bearer {KEY}",
    "Content-Type": "application/json",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Port": "443",
}


def rest_event(
    method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A request of a REST API (payload version 1)."""
    sent = {**HEADERS, **(headers or {})}
    return {
        "resource": "/{proxy+}",
        "path": path,
        "httpMethod": method,
        "headers": sent,
        "multiValueHeaders": {name: [value] for name, value in sent.items()},
        "queryStringParameters": None,
        "multiValueQueryStringParameters": None,
        "pathParameters": {"proxy": path[1:]},
        "stageVariables": None,
        "requestContext": {
            "resourcePath": "/{proxy+}",
            "httpMethod": method,
            "path": f"/v1{path}",
            "stage": "v1",
            "requestId": "c6af9ac6-7b61-11e6-9a41-93e8deadbeef",
            "identity": {"sourceIp": "198.51.100.7", "userAgent": "curl/8"},
        },
        "body": None if body is None else json.dumps(body),
        "isBase64Encoded": False,
    }


def http_event(
    method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A request of an HTTP API (payload version 2)."""
    sent = {name.lower(): value for name, value in {**HEADERS, **(headers or {})}.items()}
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": "",
        "headers": sent,
        "requestContext": {
            "apiId": "abc123",
            "domainName": HEADERS["Host"],
            "http": {
                "method": method,
                "path": path,
                "protocol": "HTTP/1.1",
                "sourceIp": "198.51.100.7",
                "userAgent": "curl/8",
            },
            "requestId": "JKJaXmPLvHcESHA=",
            "stage": "$default",
        },
        "body": None if body is None else json.dumps(body),
        "isBase64Encoded": False,
    }


def sqs_event(*messages: tuple[str, str], **attributes: str) -> dict[str, Any]:
    """Messages as (id, body), each with the same string attributes."""
    return {
        "Records": [
            {
                "messageId": message_id,
                "receiptHandle": "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a",
                "body": body,
                "attributes": {"ApproximateReceiveCount": "1"},
                "messageAttributes": {
                    name: {"dataType": "String", "stringValue": value}
                    for name, value in attributes.items()
                },
                "eventSource": "aws:sqs",
                "eventSourceARN": "arn:aws:sqs:eu-central-1:123456789012:intake",
            }
            for message_id, body in messages
        ]
    }
