"""Ray: moves references, waits, retries, restarts. Knows no mathematics. The only importer of Ray here."""
