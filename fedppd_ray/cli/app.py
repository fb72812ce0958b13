"""The `fedppd` command: parse, call one function each.

Heavy imports (torch, Ray, matplotlib) happen inside the commands, so that `--help` answers at once.
"""

import json
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fedppd_ray import __version__
from fedppd_ray.cli import facts, reference, training
from fedppd_ray.cli.batch import BatchFormat, predict_batch
from fedppd_ray.cli.console import LogFormat, configure_logging, fail, print_table
from fedppd_ray.cli.options import AddressOption, JsonOption, RootOption, RunArgument, ServedArgument
from fedppd_ray.cli.releases import promote, registry_app, rollback
from fedppd_ray.cli.sites import keys_app, site_app, sites_app
from fedppd_ray.cli.studies import active, compare
from fedppd_ray.errors import FedPPDError

app = typer.Typer(
    name="fedppd",
    help="Federated learning that knows what it does not know: FedPPD on Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(help="Fetch, parse and look at data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
data_app.command("sums")(facts.sums)
data_app.command("facts")(facts.facts)
data_app.command("clear")(facts.clear)
app.add_typer(sites_app, name="sites")
app.add_typer(site_app, name="site")
app.add_typer(keys_app, name="keys")
app.add_typer(registry_app, name="registry")


_debug = False  # whether a traceback is asked for


def _version(value: bool) -> None:
    if value:
        print(f"fedppd {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More log lines.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log lines of --verbose, and tracebacks.")] = False,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", help="Log lines as text, or as one JSON object each.")
    ] = LogFormat.TEXT,
    _show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    global _debug
    _debug = debug
    configure_logging(verbose or debug, log_format)


app.command()(training.train)
app.command()(training.resume)
app.command()(reference.config)
app.command()(compare)
app.command()(active)
app.command()(promote)
app.command()(rollback)


@app.command()
def evaluate(
    run: RunArgument,
    as_json: JsonOption = False,
    corruptions: Annotated[
        bool, typer.Option("--corruptions", help="Also on test rows with noise, blur and the like, severities 1 to 5.")
    ] = False,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            help="Labelled rows instead: <class>/*.png, arrays or a table. Several are sites, told apart by name.",
        ),
    ] = None,
) -> None:
    """Accuracy, calibration, OOD detection and abstention of a run's exported student, per class and per site too."""
    from fedppd_ray.reports.groups import group_tables
    from fedppd_ray.reports.run import figure_rows
    from fedppd_ray.runs.run import Run

    if data and corruptions:
        fail("--corruptions: made of the run's own test rows, not of --data; leave one of the two out", 2)
    figures = Run(run).evaluate(corruptions=corruptions, data=data or ())
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    rows = ", ".join(map(str, data)) if data else "held-out data"
    print_table(f"{figures['name']}: the student on {rows}", ("", ""), figure_rows(figures))
    for title, (head, *lines) in group_tables(figures).items():
        print(title)  # not the table's own, which is folded to the table's width
        print_table("", tuple(head), lines)


@app.command()
def predict(
    run: RunArgument,
    images: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="PNG or JPEG files, CSV files for a student of tables; or folders."),
    ],
    as_json: JsonOption = False,
    confidence: Annotated[
        float | None,
        typer.Option("--confidence", help="Also name a set of classes that holds the right one so surely, e.g. 0.9."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option("--coverage", help="Answer about this share of rows like the calibration rows, e.g. 0.8."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A batch job: answers go to files here. Also of .npy, Parquet, folders of images."),
    ] = None,
    form: Annotated[BatchFormat, typer.Option("--format", help="Of a batch job's files.")] = BatchFormat.PARQUET,
    part_rows: Annotated[int, typer.Option("--part-rows", min=1, help="Rows per file of a batch job.")] = 10_000,
    address: AddressOption = None,
    serial: Annotated[bool, typer.Option("--serial", help="A batch job in this process, without Ray.")] = False,
) -> None:
    """What is in these images or rows, how sure the student is, and whether it would rather not say.

    A student of tables answers in CSV: one line per row. With --out it is a batch job on Ray Data, for millions of
    rows: the same command continues one that was stopped.
    """
    if out is not None:
        predict_batch(run, images, out, form, part_rows, coverage, confidence, address, serial)
        return
    if serial or address:
        fail("--serial, --address: they are for a batch job; say where its answers go with --out DIR", 2)
    from fedppd_ray.cli.console import answers_as_csv
    from fedppd_ray.runs.run import Run

    answers = Run(run).predict(images, coverage, confidence)
    if as_json:
        print(json.dumps(answers, indent=2))
        return
    if answers and "row" in answers[0]:
        print(answers_as_csv(answers), end="")
        return
    rows = [
        (
            answer["image"],
            ("– (abstains)" if answer["abstain"] else answer["class_name"]) + (" (OOD)" if answer["ood"] else ""),
            f"{answer['class_name']} {100 * max(answer['probabilities']):.1f} %",
            f"{answer['entropy']:.3f} nats ({100 * answer['normalized_entropy']:.0f} % of the maximum)",
            *([", ".join(answer["set"])] if "set" in answer else []),
        )
        for answer in answers
    ]
    sets = (f"one of these, {100 * confidence:g} % sure",) if confidence else ()
    print_table("", ("image", "answer", "best guess", "entropy", *sets), rows)


@app.command()
def serve(
    run: ServedArgument,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Processes that share the requests.")] = 1,
    watch: Annotated[bool, typer.Option("--watch", help="Swap in a newly exported student while serving.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve although a token, or Ray's own, is missing where one is needed.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="A bearer token, or lines of NAME TOKEN. Default: $FEDPPD_TOKEN, or none."),
    ] = None,
    client_connections: Annotated[
        int, typer.Option("--client-connections", min=0, help="Connections that one address may have; 0: any number.")
    ] = 256,
    client_requests: Annotated[
        float, typer.Option("--client-requests", min=0, help="Predictions a second for one address; 0: any number.")
    ] = 0,
    access_log: Annotated[
        Path | None, typer.Option("--access-log", help="A file that gets one JSON line for each request.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Certificate chain (PEM): serve HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")] = None,
    drift_webhook: Annotated[
        str | None, typer.Option("--drift-webhook", help="A URL that is told, by POST, when what is asked has changed.")
    ] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option("--grpc-port", min=1, max=65535, help="The Open Inference Protocol over gRPC, too."),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            metavar="URL",
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="An OpenTelemetry collector that gets a trace of each request.",
        ),
    ] = None,
) -> None:
    """Answer predictions over HTTP, with a page for people, until Ctrl-C."""
    from serve.launch import Plan, serve_until

    plan = Plan(
        run,
        host,
        port,
        replicas,
        watch,
        insecure,
        token_file,
        client_connections=client_connections,
        client_requests=client_requests,
        access_log=access_log,
        certificate=tls_cert,
        key=tls_key,
        drift_webhook=drift_webhook,
        grpc_port=grpc_port,
        otlp_endpoint=otlp_endpoint,
    )
    serve_until(plan, _stop_event())


@app.command()
def methods() -> None:
    """The rows that `fedppd compare --methods` takes, those of plugins ($FEDPPD_PLUGINS) too."""
    from fedppd_ray.config.nouns import METHODS

    rows = [
        (row.label, name, str(METHODS[name].__doc__ or "").strip().split("\n")[0])
        for name in METHODS
        for row in METHODS[name].rows()
    ]
    print_table("", ("label", "method", ""), rows)


@app.command()
def report(
    run: RunArgument,
    examples: Annotated[
        bool, typer.Option("--examples/--no-examples", help="Show the most doubtful held-out rows on the page.")
    ] = True,
) -> None:
    """Write report.html and plots/*.png of a run."""
    from fedppd_ray.reports.run import report_run

    print(report_run(run, examples))


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
    from fedppd_ray.data.pictures import write_sample

    print(f"{image}: {write_sample(name, index, image, root)}")


def _stop_event() -> threading.Event:
    """Set by Ctrl-C and SIGTERM: a service stops between two looks, never in the middle of what it is doing."""
    event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: event.set())
    return event


def main(run: Callable[[], Any] = app) -> None:
    """Failures are one line and an exit code: 1 the run failed, 2 the user's to mend, 130 stopped.

    A traceback is for who asks for it, with --debug.
    """
    try:
        run()
    except Exception as error:
        if _debug:
            traceback.print_exc()
        _explain(error)
    except KeyboardInterrupt:
        fail("stopped", 130)


def _explain(error: Exception) -> NoReturn:
    if isinstance(error, FedPPDError):
        fail(str(error), error.exit_code)
    if isinstance(error, OSError):
        # A full disk, a folder without permission: the system's word is all there is to say.
        where = f"{error.filename}: " if error.filename else ""
        again = "finished rounds are saved: the same command goes on, a run with `fedppd resume`"
        fail(f"{where}{error.strerror or error}; {again}", 1)
    reason = " ".join(str(error).split())[:500]
    hint = "" if _debug else "; `fedppd --debug …` shows where"
    fail(f"a defect of fedppd, or of a plugin: {type(error).__name__}: {reason}{hint}", 1)
