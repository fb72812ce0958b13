"""The kinds of data that users bring: importing this module registers them."""

from fedppd_ray.data import folder as folder
from fedppd_ray.data import table as table
