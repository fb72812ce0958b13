"""[3][5] A client and the server as plain classes, and the executor that runs them in one process."""
