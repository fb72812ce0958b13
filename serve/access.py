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


class Gate:
    """Lets through whoever has a token, at the rate that an address may have. REST and gRPC share one."""

    def __init__(self, tokens: Tokens, settings: Settings, metrics: Metrics) -> None:
        self._tokens, self._metrics = tokens, metrics
        self._failures = Buckets(settings.failed_logins_a_second, _FAILURES_AT_ONCE)
        rate = settings.client_requests_a_second
        self._requests = Buckets(rate, max(1.0, _BURST_SECONDS * rate))

    def admit(self, client: str, presented: str | None) -> str | None:
        """The name of the token, None where none is asked for; raises a refusal."""
        owner = self._owner(client, presented) if self._tokens else None
        if wait := self._requests.take(client):
            raise _too_often("requests", wait)
        return owner

    def _owner(self, client: str, presented: str | None) -> str:
        # Before the token is looked at: whoever guesses learns nothing until the bucket has filled again.
        if wait := self._failures.wait(client):
            raise _too_often("wrong tokens", wait)
        owner = self._tokens.owner(presented) if presented is not None else None
        if owner is None:
            self._failures.take(client)
            message = "send the service's token as `Authorization: Bearer …`"
            raise RequestError(401, "unauthorised", "Authorization", message, {"WWW-Authenticate": "Bearer"})
        self._metrics.token_requests.inc(owner)
        return owner


def guard(gate: Gate) -> Guard:
    """A FastAPI dependency."""
    scheme = HTTPBearer(auto_error=False)

    async def admit(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        owner = gate.admit(request.scope[CLIENT], given.credentials if given else None)
        if owner is not None:
            request.scope[OWNER] = owner

    return admit


def _too_often(what: str, wait: float) -> RequestError:
    headers = {"Retry-After": str(math.ceil(wait))}
    return RequestError(429, "too_often", "", f"too many {what} from this address; try again later", headers)
