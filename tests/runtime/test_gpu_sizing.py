"""Ten clients and the server on one, two and three logical GPUs of a real Ray (which needs no hardware for them)."""

import subprocess
import sys
from collections import Counter

import pytest

SCRIPT = """
import json, logging, sys
import ray
from fedppd_ray.config.schema import ResourcesConfig, client_ids
from fedppd_ray.runtime.hosts import cluster_nodes
from fedppd_ray.runtime.resources import allocate, choose_device

ray.init(address="local", num_cpus=2, num_gpus=int(sys.argv[1]), include_dashboard=False, logging_level=logging.ERROR)
allocation = allocate(client_ids(10), cluster_nodes(), ResourcesConfig())

@ray.remote
class Probe:
    def device(self, share):
        assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        choice = choose_device(assigned, share.gpus, cuda_available=True)
        return assigned, choice.device, choice.memory_fraction

shares = [allocation.server, *allocation.clients.values()]
probes = [Probe.options(num_cpus=share.cpus, num_gpus=share.gpus).remote() for share in shares]
print(json.dumps(ray.get([p.device.remote(s) for p, s in zip(probes, shares)], timeout=60)))
"""


@pytest.mark.parametrize(
    ("gpus", "most_on_one"),
    [(1, 11), pytest.param(2, 6, marks=pytest.mark.long), pytest.param(3, 4, marks=pytest.mark.long)],
)
def test_ten_clients_and_the_server_fit_on_logical_gpus_within_their_memory(gpus, most_on_one):
    import json

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(gpus)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(answers) == 11
    held = Counter(assigned[0] for assigned, _, _ in answers)
    assert len(held) == gpus
    assert max(held.values()) <= most_on_one
    for gpu in held:
        fractions = [fraction for assigned, device, fraction in answers if assigned == [gpu] and device == "cuda:0"]
        assert len(fractions) == held[gpu]
        assert sum(fractions) <= 1.0
        assert min(fractions) >= 1 / most_on_one - 1e-4
