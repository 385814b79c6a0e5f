"""Events in AWS's format, as the Lambda and API Gateway developer guides document them."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote_plus

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


def event_bus_event(event_id: str, job: object) -> dict[str, Any]:
    """What a rule of EventBridge sends."""
    return {
        "version": "0",
        "id": event_id,
        "detail-type": "a job",
        "source": "com.example",
        "account": "123456789012",
        "time": "2026-01-01T00:00:00Z",
        "region": "eu-central-1",
        "resources": [],
        "detail": job,
    }


def sns_event(message_id: str, message: str, **attributes: str) -> dict[str, Any]:
    """A notification of SNS."""
    return {
        "Records": [
            {
                "EventVersion": "1.0",
                "EventSource": "aws:sns",
                "EventSubscriptionArn": "arn:aws:sns:eu-central-1:123456789012:jobs:1",
                "Sns": {
                    "Type": "Notification",
                    "MessageId": message_id,
                    "TopicArn": "arn:aws:sns:eu-central-1:123456789012:jobs",
                    "Message": message,
                    "MessageAttributes": {
                        name: {"Type": "String", "Value": value}
                        for name, value in attributes.items()
                    },
                },
            }
        ]
    }


def s3_event(bucket: str, key: str, num_bytes: int, name: str = "Put") -> dict[str, Any]:
    """An object was created."""
    return {
        "Records": [
            {
                "eventVersion": "2.1",
                "eventSource": "aws:s3",
                "awsRegion": "eu-central-1",
                "eventName": f"ObjectCreated:{name}",
                "s3": {
                    "s3SchemaVersion": "1.0",
                    "bucket": {"name": bucket, "arn": f"arn:aws:s3:::{bucket}"},
                    "object": {
                        "key": quote_plus(key, safe="/"),
                        "size": num_bytes,
                        "eTag": "d41d8cd9",
                        "sequencer": "0055AED6DCD90281E5",
                    },
                },
            }
        ]
    }


def given_up(event: object, invocation_id: str) -> dict[str, Any]:
    """What Lambda sends to the destination of an event that failed in every attempt."""
    return {
        "version": "1.0",
        "timestamp": "2026-01-01T00:00:00.000Z",
        "requestContext": {
            "requestId": invocation_id,
            "functionArn": "arn:aws:lambda:eu-central-1:123456789012:function:api:live",
            "condition": "RetriesExhausted",
            "approximateInvokeCount": 3,
        },
        "requestPayload": event,
        "responseContext": {
            "statusCode": 200,
            "executedVersion": "1",
            "functionError": "Unhandled",
        },
        "responsePayload": {"errorMessage": "{}", "errorType": "JobRefused"},
    }
