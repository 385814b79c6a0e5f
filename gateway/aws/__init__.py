"""The gateway on AWS Lambda: its events and answers. The app itself is `gateway.http.app`."""
