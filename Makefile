# What `sam build` calls for the functions of template.yaml; all run the same code.
.PHONY: build-ApiFunction build-StreamFunction build-StreamInstancesFunction \
	build-HousekeeperFunction

build-ApiFunction build-StreamFunction build-StreamInstancesFunction \
	build-HousekeeperFunction:
	scripts/build-gateway "$(ARTIFACTS_DIR)"
