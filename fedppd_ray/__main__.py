"""`python -m fedppd_ray` is the `fedppd` command."""

from fedppd_ray.cli.app import main

main()
