"""FedPPD on Ray: federated learning that knows what it does not know."""

__version__ = "0.1.0"
