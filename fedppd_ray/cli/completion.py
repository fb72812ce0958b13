"""What the shell offers after a tab, beyond commands and options: `fedppd --install-completion` turns it on."""

from pathlib import Path


def config_names(incomplete: str) -> list[str]:
    """Configurations that come along, and YAML files here."""
    from fedppd_ray.config.file import shipped_names

    folder = Path(incomplete).parent if "/" in incomplete else Path()
    prefix = f"{folder}/" if "/" in incomplete else ""
    there = sorted(folder.glob("*")) if folder.is_dir() else []
    files = [f"{prefix}{path.name}{'/' if path.is_dir() else ''}" for path in there if _offered(path)]
    return [name for name in [*shipped_names(), *files] if name.startswith(incomplete)]


def _offered(path: Path) -> bool:
    return not path.name.startswith(".") and (path.is_dir() or path.suffix in (".yaml", ".yml"))


def key_names(incomplete: str) -> list[str]:
    """Keys of a configuration, for --set: up to the sign that a value follows."""
    from fedppd_ray.config.nouns import METHODS
    from fedppd_ray.config.reference import all_keys

    return [f"{key.name}=" for key in all_keys(list(METHODS)) if key.name.startswith(incomplete)]
