"""Updates on their way in: a file each, appended to piece by piece, named by the sha256 that they must have in the end.

On disk, so that neither a cut line nor a coordinator that was killed costs a site what it has sent. One per site: a new
update takes the place of the last.
"""

import os
import threading
from pathlib import Path

from fedppd_ray.sites.wire import Blob, WireError, digest_of


class Incoming:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def have(self, site: str, blob: Blob) -> int:
        """Bytes that are there; what else the site had begun is dropped."""
        with self._lock:
            place = self._place(site, blob)
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for other in place.parent.iterdir():
                if other.name != place.name:
                    other.unlink(missing_ok=True)
            place.touch()
            return place.stat().st_size

    def append(self, site: str, digest: str, offset: int, piece: bytes) -> int | None:
        """Bytes that are there now; None: not announced. A piece elsewhere than at the end changes nothing."""
        with self._lock:
            place = self._find(site, digest)
            if place is None:
                return None
            size = _size(place)
            have = place.stat().st_size
            if offset == have and have + len(piece) <= size:
                with place.open("ab") as handle:
                    handle.write(piece)
                    handle.flush()
                    os.fsync(handle.fileno())
                have += len(piece)
            return have

    def take(self, site: str, digest: str) -> bytes:
        """The whole body, or WireError. It stays until it is dropped: a commit may come twice."""
        with self._lock:
            place = self._find(site, digest)
            if place is None:
                raise WireError("this update was not announced")
            content = place.read_bytes()
            if len(content) != _size(place):
                raise WireError(f"{len(content)} of {_size(place)} bytes have arrived")
            if digest_of(content) != digest:
                place.unlink()
                raise WireError("the bytes do not have the digest they were announced with; send them anew")
            return content

    def drop(self, site: str) -> None:
        with self._lock:
            for path in (self._folder / site).glob("*"):
                path.unlink(missing_ok=True)

    def _place(self, site: str, blob: Blob) -> Path:
        return self._folder / site / f"{blob.digest}.{blob.size}"

    def _find(self, site: str, digest: str) -> Path | None:
        return next((self._folder / site).glob(f"{digest}.*"), None)


def _size(place: Path) -> int:
    return int(place.name.rpartition(".")[2])
