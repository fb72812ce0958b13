"""Errors that users and operators meet.

Each says who, when and why, and what to do. Constructor arguments equal `args`, so that an error survives
pickling between processes.
"""


class FedPPDError(Exception):
    """Base of all expected failures: shown as one line, without a stack trace."""

    exit_code = 1


class ConfigError(FedPPDError):
    """A configuration, path or argument that cannot be used: the user's to mend."""

    exit_code = 2


class DataError(FedPPDError):
    """A data set that is missing or malformed."""

    exit_code = 2


class CheckpointError(FedPPDError):
    """A run folder that cannot be continued or read."""

    exit_code = 2


class LockedError(CheckpointError):
    """A folder that another process writes into."""


class ResourceError(FedPPDError):
    """The cluster cannot give what the run asks for."""


class QuorumError(FedPPDError):
    """Too few clients delivered a usable update; the run stopped with everything saved."""


class ServerLostError(FedPPDError):
    """The server's process died; its state must be installed again."""


class LocalUpdateCancelled(FedPPDError):
    """A client was told to give up its local update (it missed the round's deadline)."""
