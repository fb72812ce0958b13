"""A proxy as companies have them: tunnels by CONNECT, sees names and bytes only; and a network that can be gone."""

import contextlib
import socket
import struct
import threading
import time


class ConnectProxy:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.targets: list[str] = []
        self.gone = threading.Event()  # set: nothing passes, nobody is answered, nothing is said about it
        self.lost = 0  # connections that the absence has cost
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._absent():
                return _reset(client)
            head = b""
            while b"\r\n\r\n" not in head:
                part = client.recv(4096)
                if not part:
                    return client.close()
                head += part
            method, target = head.split(b"\r\n")[0].decode().split(" ")[:2]
            if method != "CONNECT":
                client.sendall(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")
                return client.close()
            self.targets.append(target)
            host, _, port = target.rpartition(":")
            server = socket.create_connection((host, int(port)), 5)
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            pumps = [
                threading.Thread(target=self._pump, args=pair, daemon=True)
                for pair in ((client, server), (server, client))
            ]
            for pump in pumps:
                pump.start()
        return None

    def _absent(self) -> bool:
        """Waits as long as the network is gone; whether it was."""
        if not self.gone.is_set():
            return False
        while self.gone.is_set():
            time.sleep(0.05)
        self.lost += 1
        return True

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                if self._absent():  # whoever kept the tunnel's state has forgotten it
                    _reset(source)
                    break
                sink.sendall(part)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
