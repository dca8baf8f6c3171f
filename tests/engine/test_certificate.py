"""The pinned certificate: the client accepts it and nothing else, and files of it do not stay."""

import contextlib
import datetime
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.certificate import Certificate, certificate_arguments, make_certificate
from megatron_scalerl.engine.client import SECRET_HEADER, EngineClient

SECRET = "the secret of this run"


@contextlib.asynccontextmanager
async def serving(certificate=None, answer=None):
    """A stand-in server, with TLS if there is a certificate; yields its port and the secrets it received."""
    received = []

    async def progress(request):
        received.append(request.headers.get(SECRET_HEADER))
        if answer is not None:
            raise answer()
        return web.json_response({"cores": [], "dead": False})

    app = web.Application()
    app.router.add_get("/msrl/progress", progress)
    runner = web.AppRunner(app)
    await runner.setup()
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with certificate_arguments(certificate) as words:
            context.load_cert_chain(words[1], words[3])
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1], received
    finally:
        await runner.cleanup()


async def asked(scheme, port, tls):
    async with EngineClient(url=f"{scheme}://127.0.0.1:{port}", secret=SECRET, tls=tls) as client:
        return await client.progress()


def test_nothing_but_making_one_needs_the_package():
    """Recipe checks and runs on one host do without it."""
    program = "import sys; sys.modules['cryptography'] = None\nimport megatron_scalerl.launch.launcher"
    subprocess.run([sys.executable, "-c", program], check=True)


async def test_the_pinned_certificate_is_accepted():
    certificate = make_certificate()
    async with serving(certificate) as (port, received):
        await asked("https", port, certificate.trusting())
    assert received == [SECRET]


def issued(pinned, other):
    """A certificate of the other key that the pinned one has signed; the agents hold the pinned key."""
    own, foreign = (x509.load_pem_x509_certificate(c.certificate.encode()) for c in (pinned, other))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(own.subject)
        .public_key(foreign.public_key())
        .serial_number(7)
        .not_valid_before(datetime.datetime(2001, 1, 1))
        .not_valid_after(datetime.datetime(2099, 1, 1))
        .sign(load_pem_private_key(pinned.key.encode(), None), hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    return Certificate(certificate=pem, key=other.key)


NOT_VERIFIED = "certificate verify failed"
REFUSED = {
    "another": lambda pinned, other: (other, "https", pinned.trusting(), NOT_VERIFIED),
    "not pinned": lambda pinned, other: (other, "https", None, NOT_VERIFIED),
    "signed": lambda pinned, other: (issued(pinned, other), "https", pinned.trusting(), NOT_VERIFIED),
    "plain server": lambda pinned, other: (None, "https", pinned.trusting(), r"(?i)ssl"),
    "plain client": lambda pinned, other: (pinned, "http", None, None),
}
"""(the server's certificate, scheme and context of the client, the error)"""


@pytest.mark.parametrize("kind", REFUSED)
async def test_all_but_the_pinned_certificate_is_refused_before_the_secret_is_sent(kind):
    certificate, scheme, tls, line = REFUSED[kind](make_certificate(), make_certificate())
    async with serving(certificate) as (port, received):
        with pytest.raises(EngineError, match=line):
            await asked(scheme, port, tls)
    assert received == []


def test_an_old_version_of_tls_is_refused():
    assert make_certificate().trusting().minimum_version is ssl.TLSVersion.TLSv1_3


async def test_a_redirection_is_not_followed():
    """It would carry the secret to another place."""
    async with serving() as (other, received):

        def elsewhere():
            return web.HTTPTemporaryRedirect(f"http://127.0.0.1:{other}/msrl/progress")

        async with serving(answer=elsewhere) as (port, _):
            with pytest.raises(EngineError, match="307"):
                await asked("http", port, None)
    assert received == []


def test_files_of_a_certificate_are_private_and_do_not_stay():
    certificate = make_certificate()
    with certificate_arguments(certificate) as words:
        assert words[::2] == ["--ssl-certfile", "--ssl-keyfile"]
        key = Path(words[3])
        modes = [path.stat().st_mode & 0o777 for path in (key.parent, key, Path(words[1]))]
        assert modes == [0o700, 0o600, 0o600]
        assert key.read_text() == certificate.key
    assert not key.parent.exists()
    with certificate_arguments(None) as words:
        assert words == []
    assert certificate.key not in repr(certificate)
