# What `sam build` calls for the functions of template.yaml; all run the same code.
.PHONY: build-ApiFunction build-StreamFunction build-StreamInstancesFunction \
	build-HousekeeperFunction build-OperatorFunction

build-ApiFunction build-StreamFunction build-StreamInstancesFunction \
	build-HousekeeperFunction build-OperatorFunction:
	scripts/build-gateway "$(ARTIFACTS_DIR)"
