"""A proxy between site and coordinator that ends TLS, reads everything, throttles, and resets connections."""

import contextlib
import socket
import ssl
import struct
import threading
import time
from pathlib import Path


class BadLine:
    """Every connection ends by a reset after `lifetime_s`; `bytes_a_second` for all of them together."""

    def __init__(
        self, target: int, certificate: Path, key: Path, ca: Path, lifetime_s: float, bytes_a_second: float = 1e9
    ) -> None:
        self._target, self._lifetime_s, self._rate = target, lifetime_s, bytes_a_second
        self._inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._inside.load_cert_chain(certificate, key)
        self._outside = ssl.create_default_context(cafile=str(ca))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.breaks = 0
        self.carried = 0  # bytes from the site, headers and what a break cut short included
        self.read = bytearray()  # what it could read of the first requests: TLS ends here
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connection, args=(client,), daemon=True).start()

    def _connection(self, raw: socket.socket) -> None:
        try:
            client = self._inside.wrap_socket(raw, server_side=True)
            outer = socket.create_connection(("127.0.0.1", self._target), 5)
            server = self._outside.wrap_socket(outer, server_hostname="127.0.0.1")
        except OSError:
            raw.close()
            return
        ends = time.monotonic() + self._lifetime_s
        pumps = [
            threading.Thread(target=self._pump, args=(one, other, ends, one is client), daemon=True)
            for one, other in ((client, server), (server, client))
        ]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        for sock in (client, server):
            # A reset, not a polite end.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    def _pump(self, source: ssl.SSLSocket, sink: ssl.SSLSocket, ends: float, outward: bool) -> None:
        source.settimeout(0.1)
        while True:
            if time.monotonic() > ends:
                with self._lock:
                    self.breaks += 1
                break
            try:
                part = source.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if not part:
                break
            self._throttle(len(part), outward)
            if len(self.read) < 10_000:
                self.read.extend(part[:1000])
            try:
                sink.sendall(part)
            except OSError:
                break
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _throttle(self, size: int, outward: bool) -> None:
        with self._lock:
            self.carried += size if outward else 0
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
