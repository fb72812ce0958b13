"""`fedppd serve` under siege: slow headers, crafted bodies, a killed launcher, a temporary folder too long."""

import contextlib
import json
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.http as triton
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.service.live import HEADERS, Server, fedppd_serve, free_port, wait_for

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from attack_bodies import JPEG, JSON, attacks, repeated_scans

BODY = json.dumps({"instances": [np.zeros((28, 28)).tolist()]}).encode()
ELSEWHERE = "127.0.0.2"  # another source address of this machine


@pytest.fixture(scope="module")
def server(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("siege")
    run = Path(shutil.copytree(digits_run, folder / "run"))
    options = ["--client-connections", "40", "--access-log", str(folder / "access.jsonl")]
    with fedppd_serve(run, folder / "log", *options) as server:
        if "HAProxy" not in server.text():
            pytest.skip("no HAProxy on this platform")
        yield server


@pytest.fixture
def honest(server: Server) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(local_address=ELSEWHERE)
    with httpx.Client(base_url=server.url, transport=transport, headers=HEADERS, timeout=30) as client:
        yield client


def ask(client: httpx.Client) -> int:
    return client.post("/predict", content=BODY, headers={"Content-Type": JSON}).status_code


def test_slow_headers_take_no_places_from_others(server: Server, honest: httpx.Client) -> None:
    """One source keeps its share of connections, and a header that does not arrive ends them."""
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    started = time.monotonic()
    time.sleep(1)
    kept = [connection for connection in slow if trickle(connection)]
    assert ask(honest) == 200
    assert len(kept) <= 40
    while kept := [connection for connection in kept if trickle(connection)]:
        assert time.monotonic() - started < 25, "headers that trickle for longer than 10 s must end the connection"
        time.sleep(0.5)
    for connection in slow:
        connection.close()


def trickle(connection: socket.socket) -> bool:
    """Sends one more byte of a header; false where the other side has closed, or answered that it is too late."""
    try:
        connection.send(b"P")
        connection.settimeout(0.001)
        connection.recv(100)
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


def test_a_client_that_sends_80_megabytes_reads_why_they_are_refused(server: Server) -> None:
    request = urllib.request.Request(
        f"{server.url}/predict", data=bytes(80_000_000), headers={"Content-Type": JSON, **HEADERS}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 413
    assert json.load(caught.value)["error"]["code"] == "body_too_large"


def test_a_large_body_without_a_token_reads_why_it_is_refused(server: Server) -> None:
    request = urllib.request.Request(f"{server.url}/predict", data=bytes(30_000_000), headers={"Content-Type": JSON})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 401


def test_honest_callers_and_health_checks_are_answered_while_others_attack(
    server: Server, honest: httpx.Client
) -> None:
    """The worst bodies before: each kept every caller waiting for seconds. Bounds are wide, for a busy machine."""
    names = ("small JPEG of many scans", "PNG of empty chunks", "JSON of unknown keys")
    bodies = list(attacks("digits", scale=0.1, names=names).values())
    bodies.append(("/predict", JPEG, repeated_scans(2500, 10**7, most=29)))
    stop = threading.Event()

    def attack(number: int) -> None:
        path, media_type, body = bodies[number]
        while not stop.is_set():
            httpx.post(f"{server.url}{path}", content=body, headers={"Content-Type": media_type, **HEADERS}, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        attackers = [pool.submit(attack, number) for number in range(4)]
        time.sleep(0.5)
        waits: dict[str, list[float]] = {"/healthz": [], "/predict": []}
        until = time.monotonic() + 5
        while time.monotonic() < until:
            started = time.monotonic()
            assert honest.get("/healthz").json() == {"status": "ok"}
            waits["/healthz"].append(time.monotonic() - started)
            started = time.monotonic()
            assert ask(honest) == 200
            waits["/predict"].append(time.monotonic() - started)
        stop.set()
        for attacker in attackers:
            attacker.result()
    assert max(waits["/healthz"]) < 1
    assert np.quantile(waits["/predict"], 0.95) < 1


def test_a_request_has_one_id_in_the_answer_and_in_the_access_log(server: Server, honest: httpx.Client) -> None:
    """Ray would repeat any id that it is sent."""
    for given, kept in (("ward-3.42", True), ("two words <b>", False)):
        answer = honest.get("/model", headers={"X-Request-Id": given})
        (sent,) = answer.headers.get_list("x-request-id")
        assert (sent == given) is kept

    def entries() -> list[dict[str, object]]:
        file = server.log.with_name("access.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    wait_for(lambda: any(entry["id"] == "ward-3.42" for entry in entries()), 10)
    (entry,) = [entry for entry in entries() if entry["id"] == "ward-3.42"]
    assert (entry["client"], entry["path"], entry["status"]) == (ELSEWHERE, "/model", 200)


def test_triton_clients_find_the_model_and_its_statistics(server: Server, honest: httpx.Client) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    (model,) = client.get_model_repository_index()
    assert (model["name"], model["state"]) == ("digits", "READY")
    before = client.get_inference_statistics("digits")["model_stats"][0]["inference_count"]
    assert ask(honest) == 200
    after = client.get_inference_statistics()["model_stats"][0]
    assert after["inference_count"] == before + 1
    assert after["last_inference"] > 1.7e12
    client.close()


def is_ours(member: psutil.Process) -> bool:
    command = " ".join(member.cmdline())
    return member.name() == "haproxy" or "decoder_process" in command or "ServeReplica" in command


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """Signed by itself, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedppd")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(*plain))
    return folder / "cert.pem", folder / "key.pem"


def test_it_restarts_after_a_kill_whatever_the_temporary_folder(digits_run: Path, tmp_path: Path) -> None:
    """HAProxy used to outlive the launcher, hold the port and answer 500. The restart tries HTTPS too."""
    long = tmp_path / ("temporary-" * 8)
    long.mkdir()
    port = free_port()
    with fedppd_serve(digits_run, tmp_path / "log", port=port, TMPDIR=str(long)) as first:
        family = psutil.Process(first.process.pid).children(recursive=True)
        proxy = next(member for member in family if member.name() == "haproxy").cmdline()
        folder = Path(proxy[proxy.index("-f") + 1]).parents[1]
        assert (folder / "lock").exists()
        ours = [member for member in family if is_ours(member)]
        first.process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(ours, timeout=30)
        assert not alive, [member.cmdline() for member in alive]
        for member in family:  # Ray's own agents take a minute to notice
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    certificate, key = own_certificate(tmp_path)
    options = ["--tls-cert", str(certificate), "--tls-key", str(key)]
    with fedppd_serve(digits_run, tmp_path / "log2", *options, port=port) as second:
        trusting = ssl.create_default_context(cafile=str(certificate))
        headers = {"Content-Type": JSON, **HEADERS}
        assert httpx.post(f"{second.url}/predict", content=BODY, headers=headers, verify=trusting).status_code == 200
        assert httpx.get(f"{second.url}/healthz", verify=trusting).json() == {"status": "ok"}
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/healthz")
    assert not folder.exists(), "what the killed one left has been removed"
