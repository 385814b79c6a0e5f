"""The quota of a tenant: the bytes of its files."""

from gateway.http.errors import ApiError
from gateway.state import Gateway


async def check_quota(gateway: Gateway, tenant: str) -> None:
    """Raises ApiError (429) if the tenant's files have reached their limit."""
    held = await gateway.broker.ask_files(lambda files: files.tenant_bytes(tenant))
    most = gateway.settings.max_tenant_file_bytes
    if most and held >= most:
        raise files_full(held, most)


def files_full(held: int, most: int) -> ApiError:
    message = f"the files of this tenant have {held} bytes; they may have {most}: delete some"
    return tenant_quota(message)


def tenant_quota(message: str) -> ApiError:
    headers = {"x-should-retry": "false", "x-dropped-reason": "tenant_quota"}
    return ApiError(429, "tenant_quota", message, headers=headers)
