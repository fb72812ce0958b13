"""`fedppd config`: every key with its description, default and range."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fedppd_ray.cli.console import fail
from fedppd_ray.cli.options import JsonOption


def config(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="A key, or a section: federation.")] = None,
    method: Annotated[str | None, typer.Option("--method", help="Only what this method reads.")] = None,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/config.md has it.")] = False,
) -> None:
    """Every key of a configuration: what it is, what it takes, its default."""
    from fedppd_ray.config.nouns import METHODS
    from fedppd_ray.config.reference import all_keys, as_markdown, built_in_methods, matching
    from fedppd_ray.registry import suggest

    if method is not None and method not in METHODS:
        fail(f"--method {method}: unknown method{suggest(method, list(METHODS))}", 2)
    methods = built_in_methods() if markdown else list(METHODS)
    methods = [method] if method else methods
    keys = all_keys(methods)
    shown = matching(keys, key) if key else keys
    if not shown:
        known = [*(each.name for each in keys), *dict.fromkeys(each.section for each in keys if each.section)]
        fail(f"{key}: unknown key{suggest(str(key), known)}", 2)
    if markdown:
        print(as_markdown(shown, methods), end="")
    elif as_json:
        print(json.dumps([asdict(each) for each in shown], indent=2, ensure_ascii=False))
    else:
        for each in shown:
            only = "" if len(each.methods) == len(methods) else f"; method {', '.join(each.methods)}"
            print(f"{each.name}: {each.default}\n    {each.description}\n    {each.values}{only}")
