"""What an operator may set, and the rules about who may call."""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fedppd_ray.errors import ConfigError

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "FEDPPD_TOKEN", "FEDPPD_TOKEN_FILE"
_MIB = 2**20


class Settings(BaseModel):
    """Limits and behaviour of one replica. Unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field(description="The run folder, or s3:// URL, whose exported student is served.")
    watch: bool = Field(False, description="Swap in a newly exported student while serving.")
    poll_seconds: float = Field(1.0, gt=0, le=3600, description="How often a watched run is looked at.")
    threads: int | None = Field(None, ge=1, description="Torch threads of a replica. Default: as Ray assigns CPUs.")
    max_images: int = Field(4096, ge=1, description="Images of one request.")
    max_body_bytes: int = Field(16 * _MIB, ge=1024, description="Bytes of one request's body.")
    max_pixels: int = Field(25_000_000, ge=1, description="Pixels of one PNG or JPEG, before it is resized.")
    max_batch: int = Field(512, ge=1, description="Images that requests share one forward pass with, at most.")
    max_pending: int = Field(256, ge=1, description="Requests in a replica, above which it answers 503.")
    max_pending_bytes: int = Field(256 * _MIB, ge=1024, description="Their bodies together, likewise.")
    body_timeout_seconds: float = Field(10.0, gt=0, description="A body that takes longer to arrive gets 408.")
    predict_timeout_seconds: float = Field(20.0, gt=0, description="A prediction that takes longer gets 504.")
    retry_after_seconds: int = Field(1, ge=1, description="Retry-After of a 503.")
    token_sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="Digest of the bearer token. The token itself never travels, nor shows in a dashboard.",
    )


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def token_fits(presented: str, digest: str) -> bool:
    """Constant-time: how long it takes says nothing about where the two differ."""
    return hmac.compare_digest(token_digest(presented), digest)


def read_token_digest(environment: Mapping[str, str], file: Path | None = None) -> str | None:
    """The digest of the token in `file`, $FEDPPD_TOKEN_FILE or $FEDPPD_TOKEN; None where none is set.

    An empty token is refused, not taken for "no token": it is most likely a secret that failed to mount.
    """
    path = file or (Path(environment[TOKEN_FILE_VARIABLE]) if TOKEN_FILE_VARIABLE in environment else None)
    if path is not None:
        source = str(path)
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the token file cannot be read ({error})") from None
    elif TOKEN_VARIABLE in environment:
        source, token = f"${TOKEN_VARIABLE}", environment[TOKEN_VARIABLE].strip()
    else:
        return None
    if not token:
        raise ConfigError(f"{source}: the token is empty; put one there, or unset it to serve without")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{source}: a token is made of printable ASCII characters without spaces")
    return token_digest(token)


def check_exposure(host: str, digest: str | None, insecure: bool) -> None:
    """Refuse to listen beyond this machine without a token, unless the operator insists."""
    if digest is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from other machines and no token is set: set ${TOKEN_VARIABLE} or "
            "--token-file, keep to 127.0.0.1, or say --insecure"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
