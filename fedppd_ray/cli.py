"""The `fedppd` command: parse, call one function each.

Heavy imports (torch, Ray, matplotlib) happen inside the commands, so that `--help` answers at once.
"""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedppd_ray import __version__
from fedppd_ray.cli_options import AddressOption, JsonOption, RootOption, RunArgument, SerialOption, SettingsOption
from fedppd_ray.cli_studies import active, compare
from fedppd_ray.console import LogFormat, configure_logging, fail, print_table
from fedppd_ray.errors import FedPPDError

app = typer.Typer(
    name="fedppd",
    help="Federated learning that knows what it does not know: FedPPD on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Fetch, parse and look at data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def _version(value: bool) -> None:
    if value:
        print(f"fedppd {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More log lines.")] = False,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="Log lines as text, or as one JSON object each.")
    ] = LogFormat.TEXT,
    _show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    configure_logging(verbose, log_format)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, e.g. configs/quickstart.yaml.")],
    out: Annotated[
        str | None,
        typer.Option("--out", help="The run folder, or s3://bucket/prefix. Default: runs/<name of the config>."),
    ] = None,
    settings: SettingsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last saved round.")] = False,
    resume_if_exists: Annotated[
        bool, typer.Option("--resume-if-exists", help="Continue the run if there is one, else start it (for retries).")
    ] = False,
    address: AddressOption = None,
    serial: SerialOption = False,
) -> None:
    """Train a student from federated clients. Ctrl-C stops; --resume continues."""
    from fedppd_ray.config_file import load_config
    from fedppd_ray.data.holdings import prepare_data
    from fedppd_ray.evaluation.report import report_run
    from fedppd_ray.progress import open_display
    from fedppd_ray.runtime.driver import train as run_training

    resolved = load_config(config, settings or [])
    folder = out or f"runs/{resolved.name}"
    prepare_data(resolved)
    try:
        with open_display() as display:
            run_training(
                resolved,
                folder,
                display,
                resume=resume,
                resume_if_exists=resume_if_exists,
                address=address,
                serial=serial,
            )
        report = report_run(folder)
    except KeyboardInterrupt:
        again = f"fedppd train {config} --out {folder} --resume"
        extra = "".join(f" --set {setting}" for setting in settings or [])
        fail(f"stopped; every finished round is saved. Continue with: {again}{extra}", 130)
    print(f"run folder: {folder}   report: {report}")


app.command()(compare)
app.command()(active)


@app.command()
def evaluate(run: RunArgument, as_json: JsonOption = False) -> None:
    """Accuracy, calibration, OOD detection and abstention of a run's exported student."""
    from fedppd_ray.evaluation.report import figure_rows
    from fedppd_ray.evaluation.run import evaluate_run

    figures = evaluate_run(run).figures
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        print_table(f"{figures['name']}: the student on held-out data", ("", ""), figure_rows(figures))


@app.command()
def predict(
    run: RunArgument,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="PNG or JPEG files.")],
    as_json: JsonOption = False,
) -> None:
    """What is in these images, how sure the student is, and whether it would rather not say."""
    from fedppd_ray.prediction import predict_files

    answers = predict_files(run, images)
    if as_json:
        print(json.dumps(answers, indent=2))
        return
    rows = [
        (
            answer["image"],
            "– (abstains)" if answer["abstain"] else answer["class_name"],
            f"{answer['class_name']} {100 * max(answer['probabilities']):.1f} %",
            f"{answer['entropy']:.3f} nats ({100 * answer['normalized_entropy']:.0f} % of the maximum)",
        )
        for answer in answers
    ]
    print_table("", ("image", "answer", "best guess", "entropy"), rows)


@app.command()
def serve(
    run: RunArgument,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Processes that share the requests.")] = 1,
    watch: Annotated[bool, typer.Option("--watch", help="Swap in a newly exported student while serving.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine although no token is set.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Holds the bearer token. Default: $FEDPPD_TOKEN, or none.")
    ] = None,
) -> None:
    """Answer predictions over HTTP, with a page for people, until Ctrl-C."""
    from serve.launch import Plan, serve_until

    serve_until(Plan(run, host, port, replicas, watch, insecure, token_file), _stop_event())


@app.command()
def report(run: RunArgument) -> None:
    """Write report.html and plots/*.png of a run."""
    from fedppd_ray.evaluation.report import report_run

    print(report_run(run))


@data_app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist5k, mnist, femnist, cifar10, …, or folder.")],
    root: RootOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write plain arrays into this folder, for `data.name: folder`.", show_default=False),
    ] = None,
    test_only: Annotated[
        bool, typer.Option("--test-only", help="Leave the training rows: `evaluation.ood` needs the test rows alone.")
    ] = False,
) -> None:
    """Download where allowed, parse once, and keep the arrays in the cache, or in a folder of your own."""
    from fedppd_ray.data.cache import cache_root
    from fedppd_ray.data.datasets import load
    from fedppd_ray.data.folder import write_folder

    if test_only and out is not None:
        fail("--test-only: a data set of your own (--out) needs its training rows too; leave one of the two out", 2)
    dataset = load(name, root)
    test = dataset.test
    if test_only:
        print(f"{name}: {len(test)} test rows in {cache_root()}")
        return
    train = dataset.train
    if out is not None:
        write_folder(out, dataset.info, train, test)
    print(f"{name}: {len(train)} training and {len(test)} test rows in {out or cache_root()}")


@data_app.command("sample")
def data_sample(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set, or glyphs.")],
    image: Annotated[Path, typer.Argument(metavar="FILE", help="The PNG file to write.")],
    index: Annotated[int, typer.Option("--index", min=0, help="Which held-out row.")] = 0,
    root: RootOption = None,
) -> None:
    """Write one held-out image as PNG, for `fedppd predict`."""
    from fedppd_ray.prediction import write_sample

    print(f"{image}: {write_sample(name, index, image, root)}")


def _stop_event() -> threading.Event:
    """Set by Ctrl-C and SIGTERM: a service stops between two looks, never in the middle of what it is doing."""
    event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: event.set())
    return event


def main(run: Callable[[], Any] = app) -> None:
    """Expected failures are one line and an exit code: 1 the run failed, 2 the user's to mend, 130 stopped."""
    try:
        run()
    except FedPPDError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        # A full disk, a folder without permission: the system's word is all there is to say.
        where = f"{error.filename}: " if error.filename else ""
        again = "finished rounds are saved: the same command goes on, `train` with --resume"
        fail(f"{where}{error.strerror or error}; {again}", 1)
    except KeyboardInterrupt:
        fail("stopped", 130)
