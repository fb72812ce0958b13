"""`fedppd sites` (at the coordinator), `fedppd site` (in the other house) and `fedppd keys`."""

import datetime
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from fedppd_ray.cli.console import print_table
from fedppd_ray.cli.options import (
    DEFAULT_GUESTS,
    DEFAULT_HOME,
    CertificateKeyOption,
    CertificateOption,
    ClientAuthorityOption,
    GuestsOption,
    HomeOption,
    ListenOption,
    RunArgument,
)

sites_app = typer.Typer(help="At the coordinator: who may join a federation over HTTPS.", no_args_is_help=True)
site_app = typer.Typer(help="At a site: take part in a federation, from your own house.", no_args_is_help=True)
keys_app = typer.Typer(help="Sign exported students, and check who signed them.", no_args_is_help=True)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The site's name, as clients.*.site has it.")]


@sites_app.command("invite")
def invite(
    name: NameArgument,
    guests: GuestsOption = DEFAULT_GUESTS,
    hours: Annotated[float, typer.Option("--hours", min=0.01, help="How long the code is good.")] = 72.0,
) -> None:
    """Print a one-time code with which this site can join."""
    from fedppd_ray.sites.guests import Guests

    print(Guests(guests).invite(name, hours))


@sites_app.command("list")
def list_sites(guests: GuestsOption = DEFAULT_GUESTS) -> None:
    """Sites that have joined, and open invitations."""
    from fedppd_ray.sites.guests import Guests

    known = Guests(guests)
    rows = [(name, f"joined {_when(guest.joined)}", guest.public_key) for name, guest in sorted(known.sites().items())]
    rows += [(name, f"invited until {_when(until)}", "") for name, until in sorted(known.invitations().items())]
    print_table("", ("site", "", "public key"), rows)


@sites_app.command("remove")
def remove(name: NameArgument, guests: GuestsOption = DEFAULT_GUESTS) -> None:
    """Put a site out, at once; a run that is on goes on without it."""
    from fedppd_ray.sites.guests import Guests

    Guests(guests).remove(name)
    print(f"{name} is out")


@sites_app.command("share")
def share(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    listen: ListenOption = None,
    certificate: CertificateOption = None,
    certificate_key: CertificateKeyOption = None,
    client_authority: ClientAuthorityOption = None,
    guests: GuestsOption = DEFAULT_GUESTS,
) -> None:
    """Let sites fetch the student of a finished run (`fedppd site fetch`), until Ctrl-C."""
    from fedppd_ray.errors import ConfigError
    from fedppd_ray.runs.export import read_card
    from fedppd_ray.sites.coordinator import open_door, parse_listen
    from fedppd_ray.sites.guests import Guests

    if listen is None:
        raise ConfigError("--listen: say where sites reach you, as HOST:PORT")
    read_card(run)
    place = parse_listen(listen, certificate, certificate_key, guests, client_authority)
    with open_door(place, Guests(guests), {}, run):
        _stop_event().wait()


@site_app.command("init")
def init(home: HomeOption = DEFAULT_HOME) -> None:
    """Make this site's key, and a policy to read and change."""
    from fedppd_ray.sites.home import POLICY, Home

    key = Home(home).init()
    print(f"public key: {key.public}\npolicy, for you to read and change: {Home(home).folder / POLICY}")


@site_app.command("join")
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="The coordinator, as https://HOST:PORT.")],
    name: Annotated[str, typer.Option("--name", help="The name that was invited.")],
    code: Annotated[str, typer.Option("--code", help="The invitation.", envvar="FEDPPD_CODE")],
    ca: Annotated[Path | None, typer.Option("--ca", help="Certificates of a private authority (PEM).")] = None,
    certificate: Annotated[
        Path | None, typer.Option("--cert", help="This site's own certificate, where the coordinator asks for one.")
    ] = None,
    certificate_key: Annotated[Path | None, typer.Option("--cert-key", help="Its key (PEM).")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Take up an invitation: once."""
    from fedppd_ray.sites.agent import join as take_up
    from fedppd_ray.sites.home import Home
    from fedppd_ray.sites.tls import Tls

    files = [None if path is None else str(path) for path in (ca, certificate, certificate_key)]
    joined = take_up(Home(home), name, url, code, Tls(*files))
    print(f"{joined.name} has joined {joined.url}, whose key is {joined.coordinator}")


@site_app.command("run")
def run_site(
    data: Annotated[Path, typer.Option("--data", help="The folder with this site's rows.", exists=True)],
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Rows to try each round's student on.", exists=True)
    ] = None,
    student: Annotated[
        Path | None, typer.Option("--student", help="A folder for the finished student, to serve it here.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, or cuda:0.")] = "cpu",
    once: Annotated[bool, typer.Option("--once", help="End with the run, instead of waiting for the next.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Take part, until Ctrl-C: dials out, opens no port."""
    from fedppd_ray.sites.agent import Agent
    from fedppd_ray.sites.home import Home
    from fedppd_ray.sites.work import Rows

    rows = Rows(data.absolute(), None if held_out is None else held_out.absolute())
    Agent(Home(home), rows, _stop_event(), device, student).run(once)


@site_app.command("show")
def show(home: HomeOption = DEFAULT_HOME) -> None:
    """Whom this site has joined, its policy, and every line of its audit log."""
    from fedppd_ray.sites.home import Home

    place = Home(home)
    joined, policy = place.joined(), place.policy()
    print(f"{joined.name} at {joined.url}\nits key        {place.key().public}\ncoordinator's  {joined.coordinator}")
    print_table("Policy", ("", ""), [(key, str(value)) for key, value in policy.model_dump(mode="json").items()])
    rows = [
        (
            entry["time"],
            entry["what"],
            str(entry.get("round", "")),
            str(entry.get("bytes", "")),
            entry.get("digest", "")[:16],
            _details(entry),
        )
        for entry in place.releases()
    ]
    print_table("Audit log", ("when", "what", "round", "bytes", "sha256", ""), rows)


@site_app.command("fetch")
def fetch(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make, for `fedppd serve`.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Fetch the newest student with its card, if the coordinator has signed it."""
    from fedppd_ray.sites.agent import fetch_student
    from fedppd_ray.sites.home import Home
    from fedppd_ray.sites.line import Line

    place = Home(home)
    joined = place.joined()
    line = Line(joined.url, joined.name, place.key(), joined.coordinator, joined.tls())
    fetch_student(line, joined.coordinator, out)
    line.close()


@keys_app.command("show")
def show_key(guests: GuestsOption = DEFAULT_GUESTS) -> None:
    """The public key that exports are signed with; it is made when it is first asked for."""
    from fedppd_ray.sites.guests import Guests

    print(Guests(guests).key().public)


@keys_app.command("sign")
def sign(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], guests: GuestsOption = DEFAULT_GUESTS
) -> None:
    """Sign the exported student of a run."""
    from fedppd_ray.runs.export import read_card
    from fedppd_ray.runs.signature import sign_export
    from fedppd_ray.sites.guests import Guests

    read_card(run, vouched=False)
    sign_export(run, Guests(guests).key())
    print(f"{run}: signed by {Guests(guests).key().public}")


@keys_app.command("verify")
def verify(run: RunArgument, key: Annotated[str, typer.Option("--key", help="The public key to trust.")]) -> None:
    """Whether this key has signed the exported student."""
    from fedppd_ray.runs.export import read_student
    from fedppd_ray.runs.layout import CARD, student_file
    from fedppd_ray.runs.remote import read_file
    from fedppd_ray.runs.signature import require_trusted

    require_trusted(run, read_file(run, student_file(CARD)), key)
    card, _ = read_student(run)
    print(f"{run}: {card['name']} {card['version']} is signed by {key}")


def _details(entry: dict[str, object]) -> str:
    parts = []
    if "rows" in entry:
        parts.append(f"rows told: {entry['rows']}")
    if entry.get("metrics"):
        parts.append(f"figures: {', '.join(map(str, entry['metrics']))}")  # type: ignore[call-overload]
    parts += [str(entry[key]) for key in ("reason", "url") if key in entry]
    return "; ".join(parts)


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _stop_event() -> threading.Event:
    event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: event.set())
    return event
