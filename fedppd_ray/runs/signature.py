"""Who made an export: an Ed25519 signature over the model card, which carries the digest of the weights.

A key is a file of its own, readable by its owner alone; a public key is 64 hexadecimal digits that may be read aloud.
Whoever sets $FEDPPD_TRUSTED_KEY loads no student that this key has not signed.
"""

import json
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedppd_ray.errors import CheckpointError, ConfigError
from fedppd_ray.runs.files import sync_folder, write_json
from fedppd_ray.runs.layout import CARD, SIGNATURE, STUDENT, student_file
from fedppd_ray.runs.remote import Location, read_file

TRUSTED = "FEDPPD_TRUSTED_KEY"
_PURPOSE = b"fedppd-export-1\n"  # a signature for one purpose is none for another


class Key:
    """A private key and what it signs."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        return self._private.sign(message).hex()

    @classmethod
    def make(cls, path: Path) -> "Key":
        """A new key in a file that only its owner reads; refuses to write over one."""
        key = Ed25519PrivateKey.generate()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path}: there is a key already; remove it yourself if nobody trusts it yet") from None
        with os.fdopen(descriptor, "w") as handle:
            handle.write(key.private_bytes_raw().hex() + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        sync_folder(path.parent)
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> "Key":
        try:
            return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip())))
        except OSError as error:
            raise ConfigError(f"{path}: no key can be read here ({error.strerror}); make one first") from None
        except ValueError:
            raise ConfigError(f"{path}: is not a private key of 64 hexadecimal digits") from None

    @classmethod
    def load_or_make(cls, path: Path) -> "Key":
        return cls.load(path) if path.exists() else cls.make(path)


def is_public_key(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == 32 and len(text) == 64 and text == text.lower()
    except ValueError:
        return False


def verified(public: str, message: bytes, signature: str) -> bool:
    """Whether the owner of this public key signed this very message."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


# ---- exports


def sign_export(run: Path, key: Key) -> None:
    """Vouch for the student that lies in a run folder now."""
    card = (run / STUDENT / CARD).read_bytes()
    write_json(run / STUDENT / SIGNATURE, {"public_key": key.public, "signature": key.sign(_PURPOSE + card)})


def export_refusal(card: bytes, signature: bytes | None, trusted: str) -> str | None:
    """Why this card is not one that the trusted key has signed, or None."""
    if signature is None:
        return f"is not signed: it has no {SIGNATURE}"
    try:
        content = json.loads(signature)
        made_by, sign = str(content["public_key"]), str(content["signature"])
    except (ValueError, KeyError, TypeError):
        return f"has a damaged {SIGNATURE}"
    if made_by != trusted:
        return f"is signed by {made_by[:64]}, not by {trusted}"
    return None if verified(trusted, _PURPOSE + card, sign) else "does not bear out its signature: it was changed"


def trusted_key() -> str | None:
    """The key in $FEDPPD_TRUSTED_KEY, or in the file that it names."""
    text = os.environ.get(TRUSTED, "").strip()
    if not text:
        return None
    if not is_public_key(text) and Path(text).is_file():
        text = Path(text).read_text().strip()
    if not is_public_key(text):
        raise ConfigError(f"${TRUSTED}: neither a public key of 64 hexadecimal digits nor a file with one")
    return text


def trust(public: str | None) -> None:
    """From here on this process loads no student that this key has not signed; None changes nothing."""
    if public is not None:
        os.environ[TRUSTED] = public


def require_trusted(run: Location, card: bytes, trusted: str | None) -> None:
    """Where a trusted key is set, CheckpointError for a card that it has not signed."""
    if trusted is None:
        return
    try:
        signature: bytes | None = read_file(run, student_file(SIGNATURE))
    except FileNotFoundError:
        signature = None
    why = export_refusal(card, signature, trusted)
    if why is not None:
        raise CheckpointError(f"{run}/{student_file(CARD)}: {why}; sign it (`fedppd keys sign`) or mend ${TRUSTED}")
