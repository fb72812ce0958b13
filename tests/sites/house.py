"""A federation in real processes on loopback: certificates of an authority made here, a coordinator, sites."""

import datetime
import hashlib
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parents[2]
NAMES = ("hospital-a", "hospital-b", "hospital-c")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


def make_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Paths of an authority's certificate, and of a certificate for 127.0.0.1 with its key."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(
        name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, issuer: str, authority: bool
    ) -> x509.Certificate:
        def called(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        builder = x509.CertificateBuilder().subject_name(called(name)).issuer_name(called(issuer))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=2))
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(identifier, critical=False)
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(by, critical=False)
        if authority:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        else:
            address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
            builder = builder.add_extension(address, critical=False)
        return builder.sign(signer, hashes.SHA256())

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    paths = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(certificate("test authority", authority, authority, "test authority", True).public_bytes(pem))
    paths[1].write_bytes(certificate("coordinator", own, authority, "test authority", False).public_bytes(pem))
    plain = serialization.NoEncryption()
    paths[2].write_bytes(own.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return paths


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fedppd_ray", *map(str, arguments)]


@dataclass
class House:
    """Everything of one test: data of three sites, a configuration, certificates, processes that end with it."""

    folder: Path
    rounds: int = 2
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ca, self.certificate, self.key = make_certificates(self.folder)
        self.guests = self.folder / "coordinator"
        self._deal()
        self.environment = {**os.environ, "FEDPPD_SITES": str(self.guests), "NO_PROXY": "127.0.0.1"}

    def _deal(self) -> None:
        from fedppd_ray.data.datasets import load

        train = load("mnist5k", None).train
        for index in range(len(NAMES)):
            place = self.data(index)
            place.mkdir(parents=True)
            rows = np.arange(index, len(train.labels), 100)[: 30 + 3 * index]  # the set is sorted by class
            np.save(place / "images.npy", np.ascontiguousarray(train.images[rows, 0]))
            np.save(place / "labels.npy", np.asarray(train.labels[rows]))

    def data(self, index: int) -> Path:
        return self.folder / f"rows-{index}"

    def config(self, sites: Sequence[int] = (0, 1, 2), **changes: object) -> Path:
        """Those clients are sites; the others have the same rows in a folder."""
        clients = {
            f"client-{index:02d}": {"site": NAMES[index]} if index in sites else {"data": str(self.data(index))}
            for index in range(3)
        }
        values = {
            "name": "tiny",
            "seed": 3,
            "data": {"calibration": 40, "partition": {"kind": "iid", "rows_per_client": 20}},
            "federation": {"clients": 3, "rounds": self.rounds},
            "client": {"epochs": 1, "batch_size": 12},
            "clients": clients,
            **changes,
        }
        path = self.folder / f"config-{len(list(self.folder.glob('config-*')))}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    # ---- processes

    def here(self, *arguments: object) -> str:
        """A command in this process, where its start would take longer than all it does."""
        from typer.testing import CliRunner

        from fedppd_ray.cli.app import app

        done = CliRunner().invoke(app, list(map(str, arguments)), env={"FEDPPD_SITES": str(self.guests)})
        assert done.exit_code == 0, done.output
        return done.output

    def start(self, log: str, *arguments: object, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{log}.log").open("ab") as out:
            process = subprocess.Popen(
                command(*arguments), cwd=ROOT, env={**self.environment, **environment}, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def coordinate(self, config: Path, out: Path, *extra: object, serial: bool = True) -> subprocess.Popen[bytes]:
        return self.start(
            "coordinator", "train", config, "--out", out, "--listen", f"127.0.0.1:{self.port}",
            "--tls-cert", self.certificate, "--tls-key", self.key, *(["--serial"] if serial else []), *extra,
        )  # fmt: skip

    def home(self, index: int) -> Path:
        return self.folder / f"home-{index}"

    def join(self, index: int, port: int | None = None) -> None:
        """By way of the library: a command each would take two seconds."""
        from fedppd_ray.sites.agent import join
        from fedppd_ray.sites.guests import Guests
        from fedppd_ray.sites.home import Home
        from fedppd_ray.sites.tls import Tls

        home = Home(self.home(index))
        home.init()
        code = Guests(self.guests).invite(NAMES[index], 1.0)
        url = f"https://127.0.0.1:{port or self.port}"
        wait_for(lambda: listening(port or self.port), 150, "the coordinator's door")
        join(home, NAMES[index], url, code, Tls(str(self.ca)))

    def site(self, index: int, *extra: object, once: bool = True, **environment: str) -> subprocess.Popen[bytes]:
        arguments = ("--home", self.home(index), "--data", self.data(index), *(["--once"] if once else []), *extra)
        return self.start(f"site-{index}", "site", "run", *arguments, **environment)

    def change_policy(self, index: int, old: str, new: str) -> None:
        path = self.home(index) / "policy.yaml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def part_of_an_update(self, index: int) -> bool:
        """Whether the coordinator has some bytes of this site's update, and not all."""
        for path in (self.guests / "incoming" / NAMES[index]).glob("*.*"):
            if 0 < path.stat().st_size < int(path.suffix[1:]):
                return True
        return False

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def troubles(self) -> str:
        """All logs, for a failed assertion."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


def listening_sockets(pid: int) -> list[str]:
    """TCP and UDP, by `ss`, as an administrator would look; where there is none, by psutil."""
    if shutil.which("ss"):
        found = subprocess.run(["ss", "-Hlntup"], capture_output=True, text=True, check=True).stdout
        return [line for line in found.splitlines() if f"pid={pid}," in line]
    return [str(link) for link in psutil.Process(pid).net_connections() if link.status == psutil.CONN_LISTEN]


def listening(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.5)
        return sock.connect_ex(("127.0.0.1", port)) == 0


def digest(run: Path) -> str:
    return hashlib.sha256((run / "student" / "student.safetensors").read_bytes()).hexdigest()
