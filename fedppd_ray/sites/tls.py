"""Certificates of a site's line: whose it believes, and its own where the coordinator asks for one (mutual TLS)."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from fedppd_ray.errors import ConfigError


@dataclass(frozen=True)
class Tls:
    """`ca`: a private authority's certificates; None: the system's. `certificate` and `key`: the site's own."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def absolute(self) -> "Tls":
        """The same files, wherever the process is started next."""
        return Tls(
            *(None if path is None else str(Path(path).absolute()) for path in (self.ca, self.certificate, self.key))
        )

    def context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca {self.ca}: no certificate can be read there ({error})") from None
        if self.certificate is None:
            return context
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--cert {self.certificate}, --cert-key {self.key}: cannot be used ({error})") from None
        return context
