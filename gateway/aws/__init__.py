"""The gateway on AWS Lambda: what wakes it and what it answers. The app itself is `gateway.app`."""
