"""Which student is served: versions that never change, gates, pointers, and a log of who moved them and why."""
