"""`fedppd promote`, `fedppd rollback` and `fedppd registry`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedppd_ray.cli.console import fail, print_table
from fedppd_ray.cli.options import JsonOption

registry_app = typer.Typer(help="Look at a registry of students: versions, pointers, decisions.", no_args_is_help=True)

# Text, not a Path, which would turn s3://bucket into s3:/bucket.
RegistryArgument = Annotated[
    str, typer.Argument(metavar="REGISTRY", help="A folder or s3:// URL, as `fedppd promote --to` made it.")
]
ByOption = Annotated[
    str | None,
    typer.Option("--by", help="Who decides, for the audit log. Default: user@machine.", envvar="FEDPPD_BY"),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the audit log.")]


def promote(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder or URL, or the name of a version in the registry.")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="REGISTRY", help="A folder, s3://… or mlflow://MODEL; made if new.")
    ],
    gates: Annotated[
        Path | None,
        typer.Option("--gates", help="A YAML file. Default: gates.yaml in the registry, or the built-in ones."),
    ] = None,
    candidate: Annotated[
        bool, typer.Option("--candidate", help="Make it the candidate, without traffic: a person decides later.")
    ] = False,
    shadow: Annotated[
        float | None,
        typer.Option(
            "--shadow",
            min=0.001,
            max=1.0,
            metavar="SHARE",
            help="Make it the candidate; the service asks it about this share of requests, and never returns it.",
        ),
    ] = None,
    canary: Annotated[
        float | None,
        typer.Option(
            "--canary",
            min=0.001,
            max=1.0,
            metavar="SHARE",
            help="Make it the candidate; the service returns its answers to this share of requests.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Although gates are not met; needs --reason.")] = False,
    reason: ReasonOption = "",
    by: ByOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let gates judge a run's student, and make it the version that is served, if they are met."""
    from fedppd_ray.releases.promotion import Wish
    from fedppd_ray.releases.state import whoami
    from fedppd_ray.releases.targets import target_at

    wish = Wish(by or whoami(), gates, _trial(candidate, shadow, canary), force, reason)
    verdict = target_at(to).promote(run, wish)
    if as_json:
        print(verdict.model_dump_json(indent=2))
    else:
        title = f"{verdict.version}, beside {verdict.against or 'no current version'}; gates from {verdict.gates_from}"
        print_table(title, ("figure", "this version", "current", "gate", ""), verdict.rows())
    if not verdict.let_through:
        fail(f"{verdict.version} is refused: {verdict.why()}", 1)
    if not as_json:
        became = "candidate" if wish.trial else "current"
        print(f"{verdict.version} is {became}{' by force' if verdict.forced else ''}")


def _trial(candidate: bool, shadow: float | None, canary: float | None) -> Any:
    from fedppd_ray.errors import ConfigError
    from fedppd_ray.releases.promotion import Trial

    if candidate + (shadow is not None) + (canary is not None) > 1:
        raise ConfigError("--candidate, --shadow, --canary: choose one")
    if shadow is not None:
        return Trial("shadow", shadow)
    if canary is not None:
        return Trial("canary", canary)
    return Trial("wait", 0.0) if candidate else None


def rollback(
    registry: RegistryArgument,
    version: Annotated[
        str | None, typer.Option("--to", metavar="VERSION", help="Default: the one that was current before.")
    ] = None,
    candidate: Annotated[
        bool, typer.Option("--candidate", help="End the trial of the candidate instead; current stays.")
    ] = False,
    reason: ReasonOption = "",
    by: ByOption = None,
) -> None:
    """Serve the version again that was current before."""
    from fedppd_ray.errors import ConfigError
    from fedppd_ray.releases.state import whoami
    from fedppd_ray.releases.targets import target_at

    if candidate and version is not None:
        raise ConfigError("--candidate, --to: choose one")
    print(target_at(registry).rollback(by or whoami(), reason, version, candidate))


@registry_app.command("list")
def list_versions(registry: RegistryArgument, as_json: JsonOption = False) -> None:
    """Every version, the newest last, and which is current and candidate."""
    from fedppd_ray.releases.targets import target_at

    rows = target_at(registry).versions()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = [tuple(str(row[key]) for key in ("version", "name", "round", "registered", "by", "status")) for row in rows]
    print_table("", ("version", "name", "round", "registered", "by", ""), table)


@registry_app.command("show")
def show(
    registry: RegistryArgument,
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]", help="Default: the current one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """A version: whence it comes, its digests, and what the gates said."""
    from fedppd_ray.errors import ConfigError
    from fedppd_ray.releases.registry import Registry

    known = Registry.open(registry)
    chosen = version or known.state().current
    if chosen is None:
        raise ConfigError(f"{registry}: nothing is current yet; name a version")
    known.verified(chosen)
    manifest, verdict = known.manifest(chosen), known.verdict_of(chosen)
    if as_json:
        print(json.dumps({**manifest, "verdict": verdict.model_dump(mode="json") if verdict else None}, indent=2))
        return
    facts = [(key, str(value)) for key, value in manifest.items() if key != "digests"]
    print_table("", ("", ""), facts + [(f"sha256 of {name}", digest) for name, digest in manifest["digests"].items()])
    if verdict:
        print(verdict.markdown())


@registry_app.command("log")
def show_log(registry: RegistryArgument, as_json: JsonOption = False) -> None:
    """The audit log: who decided what, when and why. Fails where a line was changed or taken out."""
    from fedppd_ray.releases.registry import Registry

    entries = Registry.open(registry).entries()
    if as_json:
        print("\n".join(entry.model_dump_json() for entry in entries))
        return
    rows = [
        (entry.time, entry.who, f"{entry.what}{' by force' if entry.forced else ''}", entry.version, entry.why)
        for entry in entries
    ]
    print_table("", ("when", "who", "what", "version", "why"), rows)
