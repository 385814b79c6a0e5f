# What `sam build` calls for the functions of template.yaml; all three run the same code.
.PHONY: build-ApiFunction build-StreamFunction build-HousekeeperFunction

build-ApiFunction build-StreamFunction build-HousekeeperFunction:
	scripts/build-gateway "$(ARTIFACTS_DIR)"
