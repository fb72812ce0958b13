"""Who may ask for predictions, and how often."""

import math
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from serve.metrics import Metrics
from serve.middleware import CLIENT, OWNER
from serve.refusals import RequestError
from serve.settings import Settings
from serve.tokens import Buckets, Tokens

_FAILURES_AT_ONCE = 10
_BURST_SECONDS = 2

Guard = Callable[..., Awaitable[None]]


def guard(tokens: Tokens, settings: Settings, metrics: Metrics) -> Guard:
    """A FastAPI dependency that lets through whoever has a token, at the rate that an address may have."""
    scheme = HTTPBearer(auto_error=False)
    failures = Buckets(settings.failed_logins_a_second, _FAILURES_AT_ONCE)
    rate = settings.client_requests_a_second
    requests = Buckets(rate, max(1.0, _BURST_SECONDS * rate))

    async def admit(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        client = request.scope[CLIENT]
        if tokens:
            # Before the token is looked at: whoever guesses learns nothing until the bucket has filled again.
            if wait := failures.wait(client):
                raise _too_often("wrong tokens", wait)
            owner = tokens.owner(given.credentials) if given else None
            if owner is None:
                failures.take(client)
                raise RequestError(
                    401,
                    "unauthorised",
                    "Authorization",
                    "send the service's token as `Authorization: Bearer …`",
                    {"WWW-Authenticate": "Bearer"},
                )
            request.scope[OWNER] = owner
            metrics.token_requests.inc(owner)
        if wait := requests.take(client):
            raise _too_often("requests", wait)

    return admit


def _too_often(what: str, wait: float) -> RequestError:
    headers = {"Retry-After": str(math.ceil(wait))}
    return RequestError(429, "too_often", "", f"too many {what} from this address; try again later", headers)
