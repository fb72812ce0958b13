"""HTTPS by the service's own HAProxy."""

import os
import ssl
from pathlib import Path

from fedppd_ray.errors import ConfigError


def certificate_file(certificate: Path | None, key: Path | None, folder: Path) -> Path | None:
    """Chain and key as HAProxy wants them, one file that only this user reads. None where neither is given."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key: give both, or neither")
    try:
        # OpenSSL would ask for a passphrase at the terminal; an empty one makes an encrypted key fail here.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
        content = certificate.read_bytes().rstrip() + b"\n" + key.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tls-cert {certificate} --tls-key {key}: cannot be used ({error})") from None
    path = folder / "tls.pem"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    return path
