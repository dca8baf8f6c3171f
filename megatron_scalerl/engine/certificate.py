"""Makes the TLS certificate of engines on other hosts: a new certificate at every start of a run.

The certificate is self-signed, and the controller's clients trust this certificate alone, so a server that passes the
check holds the private key. Host names are not compared, since a name proves less than the key. The agents on the
hosts receive certificate and key over an encrypted socket (`launch.agents`).
"""

import contextlib
import datetime
import ssl
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.record import record

_BEGIN = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""The date that means "no well-defined expiration date" in RFC 5280 (4.1.2.5).

A certificate is used for one start of a run only, and must not count as expired on a host whose clock is wrong.
"""


@record
class Certificate:
    """A certificate and the private key. Produced by `make_certificate`."""

    certificate: str
    """The certificate in PEM."""
    key: str = field(repr=False)
    """The private key in PEM, not encrypted; secret."""

    def trusting(self) -> ssl.SSLContext:
        """A client's TLS context that trusts this certificate alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The client accepts this certificate alone, so the host name would prove nothing more.
        context.check_hostname = False
        context.load_verify_locations(cadata=self.certificate)
        return context


def make_certificate() -> Certificate:
    """A new self-signed certificate, which cannot sign other certificates."""
    # The import is here because only a run on several hosts needs the package cryptography.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "megatron_scalerl engine")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(private, hashes.SHA256())
    )
    key = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(), key=key.decode())


@contextlib.contextmanager
def certificate_arguments(certificate: Certificate | None) -> Iterator[list[str]]:
    """Context with vLLM's command-line arguments for TLS; an empty list without a certificate.

    The arguments name files that only this user can read. The end of the block deletes the files, which the server
    has to have read by then.
    """
    arguments: list[str] = []
    with private_folder() as folder:
        if certificate is not None:
            for option, text in (("--ssl-certfile", certificate.certificate), ("--ssl-keyfile", certificate.key)):
                path = Path(folder.folder) / f"{option.removeprefix('--ssl-')}.pem"
                path.touch(mode=0o600, exist_ok=False)
                path.write_text(text, encoding="ascii")
                arguments += [option, str(path)]
        yield arguments
