# What `sam build` calls for the functions of infra/aws/*.yaml; all run the same code. Before it, the
# parameters are checked and written for `sam deploy`: infra/aws/parameters.py.
PYTHON := $(firstword $(wildcard .venv-sam/bin/python .venv/bin/python) python3)

.PHONY: build-ApiFunction build-StreamFunction build-StreamInstancesFunction \
	build-HousekeeperFunction build-OperatorFunction

build-ApiFunction build-StreamFunction build-StreamInstancesFunction \
	build-HousekeeperFunction build-OperatorFunction:
	$(PYTHON) -m infra.aws.parameters
	scripts/build-gateway "$(ARTIFACTS_DIR)"
