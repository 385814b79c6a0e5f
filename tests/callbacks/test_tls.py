"""TLS to a checked address: the certificate must match the URL's host name."""

import datetime
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from contract.callback_urls import AllowList
from tests.callbacks.receiver import SECRET, Answer, Receiver, always
from workers.callbacks.retries import Delivered, DeliveryFailed
from workers.callbacks.webhook import AddressGuard, WebhookSender, signed_headers

pytestmark = pytest.mark.anyio

NAME = "receiver.example"
LOOPBACK = AllowList.parse(["127.0.0.1"])


def certificate(path: Path, name: str) -> Path:
    """A certificate of a new authority, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


async def loopback(host: str, port: int) -> Sequence[str]:
    """Resolves every name to this machine."""
    return ["127.0.0.1"]


@pytest.mark.parametrize("asked", [NAME, "other.example"])
async def test_the_name_is_verified_at_the_checked_address(tmp_path: Path, asked: str) -> None:
    """SNI and Host are the URL's. A certificate of another name is rejected."""
    pem = certificate(tmp_path / "server.pem", NAME)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pem)
    names: list[str | None] = []
    serving.sni_callback = lambda _, name, __: names.append(name)
    webhooks = WebhookSender(
        LOOPBACK,
        AddressGuard(LOOPBACK, loopback),
        timeout_s=5.0,
        tls=ssl.create_default_context(cafile=str(pem)),
    )
    async with Receiver({"/": always(Answer())}, tls=serving) as receiver:
        port = receiver.url("").rpartition(":")[2]
        headers = signed_headers("m-1", int(datetime.datetime.now().timestamp()), b"{}", [SECRET])
        outcome = await webhooks.send(f"https://{asked}:{port}/", b"{}", headers)
    await webhooks.aclose()
    assert names == [asked]
    if asked == NAME:
        assert isinstance(outcome, Delivered)
        assert receiver.messages[0].headers["host"] == f"{NAME}:{port}"
    else:
        assert isinstance(outcome, DeliveryFailed)
        assert receiver.messages == []


async def test_a_long_response_is_cut_off(tmp_path: Path) -> None:
    """After 64 kB."""
    webhooks = WebhookSender(LOOPBACK, AddressGuard(LOOPBACK), timeout_s=20.0)
    async with Receiver({"/": always(Answer(200, endless=True))}) as receiver:
        headers = signed_headers("m-1", int(datetime.datetime.now().timestamp()), b"{}", [SECRET])
        assert isinstance(await webhooks.send(receiver.url("/"), b"{}", headers), Delivered)
    await webhooks.aclose()


async def test_a_silent_receiver_is_given_up_in_time() -> None:
    """The limit counts from the name lookup to the end of the response."""
    webhooks = WebhookSender(LOOPBACK, AddressGuard(LOOPBACK), timeout_s=0.2)
    async with Receiver({"/": always(Answer(delay_s=5))}) as receiver:
        headers = signed_headers("m-1", int(datetime.datetime.now().timestamp()), b"{}", [SECRET])
        outcome = await webhooks.send(receiver.url("/"), b"{}", headers)
    await webhooks.aclose()
    assert outcome == DeliveryFailed("no answer within 0.2 s")


async def test_retry_after_is_part_of_the_failure() -> None:
    webhooks = WebhookSender(LOOPBACK, AddressGuard(LOOPBACK), timeout_s=5)
    busy = Answer(503, headers={"retry-after": "77"})
    async with Receiver({"/": always(busy)}) as receiver:
        headers = signed_headers("m-1", int(datetime.datetime.now().timestamp()), b"{}", [SECRET])
        outcome = await webhooks.send(receiver.url("/"), b"{}", headers)
    await webhooks.aclose()
    assert outcome == DeliveryFailed("HTTP 503", 77.0)
