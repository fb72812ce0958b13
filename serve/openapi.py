"""Schemas of bodies that the service parses itself, so that FastAPI does not know them."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_PLACE = "#/components/schemas/{model}"


class Schemas:
    """Collects them, and puts them where the references of the OpenAPI document point."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def of(self, model: type[BaseModel]) -> dict[str, str]:
        schema = model.model_json_schema(ref_template=_PLACE)
        self._found |= schema.pop("$defs", {}) | {model.__name__: schema}
        return {"$ref": _PLACE.format(model=model.__name__)}

    def publish(self, app: FastAPI) -> None:
        """To be called when all routes are there: the document is made now, not while requests wait for it."""
        app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(self._found)
