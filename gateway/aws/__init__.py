"""The gateway on AWS Lambda. The app itself is `gateway.app`."""
