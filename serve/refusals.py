"""Refusals that a caller sees: a status, the field that is wrong, and what to do. No web framework here, because the
decoder processes raise them too."""

from collections.abc import Mapping

# A field may be a name that the caller made up: an answer does not repeat megabytes of it.
_LONGEST_FIELD = 200


class RequestError(Exception):
    """Answered as JSON with this status; `field` names the part of the request that is to be mended."""

    def __init__(
        self, status: int, code: str, field: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, code, field, message, headers)
        self.status = status
        self.code = code
        self.field = field if len(field) <= _LONGEST_FIELD else f"{field[:_LONGEST_FIELD]}…"
        self.message = message
        self.headers = dict(headers or {})


def invalid(field: str, message: str) -> RequestError:
    """422: well-formed, but not what the model takes."""
    return RequestError(422, "invalid_input", field, message)


def malformed(field: str, message: str) -> RequestError:
    """400: cannot be parsed at all."""
    return RequestError(400, "malformed", field, message)


def image_too_large(message: str) -> RequestError:
    return RequestError(413, "image_too_large", "body", message)
