"""The secrets that sign callbacks, as Standard Webhooks writes them. Never shown, never logged."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of all secrets
_SECRET_BYTES = range(24, 65)


def is_secret(text: str) -> bool:
    """Whether a text is a signing secret as Standard Webhooks writes them."""
    if not text.startswith(SECRET_PREFIX):
        return False
    try:
        return len(base64.b64decode(text[len(SECRET_PREFIX) :], validate=True)) in _SECRET_BYTES
    except binascii.Error:
        return False


@dataclass(frozen=True, slots=True)
class Secrets:
    """Signing secrets by tenant, "" for all others, for jobs without a secret of their own.

    Each of several secrets signs, so that a receiver can replace one by the next.
    """

    by_tenant: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str) -> "Secrets":
        """Reads `whsec_new,whsec_old tenant=whsec_other`. Raises ValueError without secrets."""
        found: dict[str, tuple[str, ...]] = {}
        for entry in text.split():
            tenant, listed = "", entry
            if not entry.startswith(SECRET_PREFIX):
                tenant, _, listed = entry.partition("=")
            secrets = tuple(listed.split(","))
            if not all(is_secret(secret) for secret in secrets):
                whose = f"of tenant {tenant!r}" if tenant else "for all tenants"
                raise ValueError(
                    f"a secret {whose} is not `{SECRET_PREFIX}` and 24 to 64 bytes in base64"
                )
            found[tenant] = secrets
        return cls(found)

    def of(self, tenant: str) -> tuple[str, ...]:
        return self.by_tenant.get(tenant) or self.by_tenant.get("", ())
