"""What an operator may set, and the rules about who may call."""

import ipaddress
from collections.abc import MutableMapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedppd_ray.errors import ConfigError
from serve.tokens import TOKEN_VARIABLE

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
RAY_AUTHENTICATION = "RAY_AUTH_MODE"
_MIB = 2**20


class Settings(BaseModel):
    """Limits and behaviour of one replica. Unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field(description="The run or registry, a folder or s3:// URL, whose student is served.")
    watch: bool = Field(False, description="Swap in a newly exported student while serving.")
    poll_seconds: float = Field(1.0, gt=0, le=3600, description="How often a watched run is looked at.")
    threads: int | None = Field(None, ge=1, description="Torch threads of a replica. Default: as Ray assigns CPUs.")
    max_images: int = Field(4096, ge=1, description="Images of one request.")
    max_body_bytes: int = Field(16 * _MIB, ge=1024, description="Bytes of one request's body.")
    max_linger_bytes: int = Field(
        128 * _MIB, ge=0, description="Of a body that is refused, so much is taken, that its sender reads the answer."
    )
    max_pixels: int = Field(25_000_000, ge=1, description="Pixels of one PNG or JPEG, before it is resized.")
    max_batch: int = Field(512, ge=1, description="Images that requests share one forward pass with, at most.")
    max_pending: int = Field(256, ge=1, description="Requests in a replica, above which it answers 503.")
    max_pending_bytes: int = Field(256 * _MIB, ge=1024, description="Their bodies together, likewise.")
    body_timeout_seconds: float = Field(10.0, gt=0, description="A body that takes longer to arrive gets 408.")
    predict_timeout_seconds: float = Field(20.0, gt=0, description="A prediction that takes longer gets 504.")
    decode_seconds: float = Field(
        2.0, gt=0, le=60, description="Processor time that decoding one body may take, before its process is ended."
    )
    decoders: int = Field(1, ge=1, le=64, description="Processes that decode large bodies; small ones have their own.")
    retry_after_seconds: int = Field(1, ge=1, description="Retry-After of a 503.")
    allow_networks: tuple[str, ...] = Field(
        (),
        description="Networks of your own (package.module:Class) that may be imported, besides $FEDPPD_ALLOW_NETWORKS.",
    )
    trusted_key: Digest | None = Field(
        None,
        description="Public key that must have signed what is served. Default: $FEDPPD_TRUSTED_KEY.",
    )
    tokens: dict[str, Digest] = Field(
        {},
        description="SHA-256 of each bearer token, by name. Tokens themselves never travel, nor show in a dashboard.",
    )
    token_file: str | None = Field(None, description="Where replicas look for changed tokens, if they can read it.")
    client_header: str | None = Field(None, description="Holds the caller's address, set by a proxy one can trust.")
    client_requests_a_second: float = Field(0.0, ge=0, description="Predictions for one address; 0: any number.")
    failed_logins_a_second: float = Field(
        1.0, ge=0, description="Wrong tokens from one address, after ten at once; beyond, 429. 0: any number."
    )
    grpc_host: str = Field("127.0.0.1", description="Where replicas answer the Open Inference Protocol over gRPC.")
    grpc_port: int | None = Field(None, ge=1, le=65535, description="The port of all replicas of a node; None: no gRPC")
    grpc_certificate: str | None = Field(None, description="Certificate chain (PEM) for gRPC over TLS.")
    grpc_key: str | None = Field(None, description="Its private key (PEM).")
    metrics_folder: str | None = Field(
        None, description="Where replicas write their metrics, so that each can answer for all; None: for itself."
    )
    otlp_endpoint: str | None = Field(None, description="An OpenTelemetry collector, for traces by OTLP/HTTP.")
    drift_seconds: float = Field(900.0, ge=1, le=86_400, description="How often rows are compared with known ones.")
    drift_false_alarms: float = Field(
        0.01, gt=0, lt=1, description="Share of days with a drift alarm in a replica, where nothing has changed."
    )
    drift_webhook: str | None = Field(
        None, pattern="^https?://", description="Gets a POST with JSON when drift begins, and when it ends."
    )
    trial_budget: float = Field(
        0.02, gt=0, le=1, description="Share of a core that comparing a candidate with the current student may take."
    )
    access_log: str | None = Field(None, description="A file that gets one JSON line for each request.")


def check_exposure(host: str, has_token: bool, insecure: bool) -> None:
    """Refuse to listen beyond this machine without a token, unless the operator insists."""
    if not has_token and not insecure and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from other machines and no token is set: set ${TOKEN_VARIABLE} or "
            "--token-file, keep to 127.0.0.1, or say --insecure"
        )


def check_ray_authentication(environment: MutableMapping[str, str], insecure: bool) -> None:
    """For a Ray of our own. Some of its ports are on all interfaces, and whoever may speak to them runs code here."""
    mode = environment.setdefault(RAY_AUTHENTICATION, "token")
    if mode.strip().lower() != "token" and not insecure:
        raise ConfigError(
            f"${RAY_AUTHENTICATION}={mode}: Ray's own ports would run anybody's code; unset it, set it to token, or "
            "say --insecure"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
