"""Shares of a cluster: everyone fits, no fraction straddles a device, and what cannot be had is refused."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedppd_ray.config.schema import ClientOverrides, ResourcesConfig, client_ids
from fedppd_ray.errors import ResourceError
from fedppd_ray.runtime.resources import (
    DeviceChoice,
    NodeResources,
    Share,
    allocate,
    choose_device,
    largest_share,
    matches,
)

CLIENTS = client_ids(10)
LAPTOP = NodeResources("1", "laptop", 2, 0)


def gpu_node(gpus: float, cpus: float = 8, name: str = "box") -> NodeResources:
    return NodeResources(name, name, cpus, gpus)


def units(value: float) -> int:
    """Ray's ten-thousandths."""
    return round(value * 10_000)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 64).map(lambda n: n / 2), min_size=1, max_size=5), st.integers(1, 200))
@example([19.5, 24.0, 28.5], 126)
def test_equal_shares_fit_without_straddling_and_none_larger_would(capacities: list[float], holders: int) -> None:
    share = largest_share(capacities, holders)
    assert 0 < share <= 1
    assert units(share) == pytest.approx(share * 10_000, abs=1e-6)  # Ray's granularity

    def fit(ten_thousandths: int) -> int:
        return sum(units(capacity) // ten_thousandths for capacity in capacities)

    assert fit(units(share)) >= holders
    assert share == 1 or fit(units(share) + 1) < holders


def test_nothing_can_be_shared_out_of_nothing() -> None:
    assert largest_share([], 3) == 0
    assert largest_share([1.0], 20_000) == 0  # finer than Ray counts


def test_ten_clients_and_the_server_fit_two_cores() -> None:
    allocation = allocate(CLIENTS, [LAPTOP], ResourcesConfig())
    everyone = [*allocation.clients.values(), allocation.server]
    assert len(allocation.clients) == 10
    assert sum(units(share.cpus) for share in everyone) <= 20_000
    assert min(share.cpus for share in everyone) > 0.18
    assert all(share.gpus == 0 and share.threads == 1 for share in everyone)


@pytest.mark.parametrize(("gpus", "share"), [(1, 0.0909), (2, 0.1666), (3, 0.25)])
def test_ten_clients_and_the_server_share_gpus_without_straddling(gpus: int, share: float) -> None:
    allocation = allocate(CLIENTS, [gpu_node(gpus)], ResourcesConfig())
    assert {own.gpus for own in allocation.clients.values()} == {share}
    assert allocation.server.gpus == share
    assert gpus * (10_000 // units(share)) >= 11
    choice = choose_device([0], share, cuda_available=True)
    assert choice == DeviceChoice("cuda:0", share)
    assert math.floor(1 / share) * (choice.memory_fraction or 1) <= 1


def test_gpus_of_several_nodes_count_one_by_one() -> None:
    allocation = allocate(client_ids(3), [gpu_node(1, name="a"), gpu_node(1, name="b")], ResourcesConfig())
    assert {share.gpus for share in allocation.clients.values()} == {0.5}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32).map(lambda n: n / 2), min_size=2, max_size=5), st.integers(1, 30))
def test_whichever_of_several_nodes_dies_everyone_fits_on_the_others(cpus: list[float], count: int) -> None:
    nodes = [NodeResources(str(number), str(number), own, 0) for number, own in enumerate(cpus)]
    allocation = allocate(client_ids(count), nodes, ResourcesConfig())
    share = units(allocation.server.cpus)
    assert {units(own.cpus) for own in allocation.clients.values()} == {share}
    for dead in range(len(cpus)):
        assert sum(units(own) // share for number, own in enumerate(cpus) if number != dead) >= count + 1


def test_gpus_are_shared_out_to_the_last_one() -> None:
    """A share of a GPU caps its memory, so none is kept in reserve."""
    nodes = [gpu_node(1, name=name) for name in "abc"]
    assert allocate(client_ids(2), nodes, ResourcesConfig()).server.gpus == 1.0


def test_a_client_never_gets_more_than_one_core_by_itself() -> None:
    allocation = allocate(client_ids(2), [NodeResources("1", "big", 64, 0)], ResourcesConfig())
    assert {share.cpus for share in allocation.clients.values()} == {1.0}


def test_numbers_in_the_configuration_are_taken_as_they_are() -> None:
    config = ResourcesConfig(client_cpus=0.1, client_gpus=0, server_cpus=1, server_gpus=0.5)
    allocation = allocate(CLIENTS, [gpu_node(1, cpus=2)], config)
    assert set(allocation.clients.values()) == {Share(0.1, 0)}
    assert allocation.server == Share(1, 0.5)


def test_an_override_concerns_its_client_alone() -> None:
    config = ResourcesConfig(client_cpus=0.5, client_gpus=0.1)
    wishes = {"client-03": ClientOverrides(cpus=4, gpus=0)}
    allocation = allocate(CLIENTS, [gpu_node(2, cpus=16)], config, wishes)
    assert allocation.clients["client-03"] == Share(4, 0)
    assert {share for client, share in allocation.clients.items() if client != "client-03"} == {Share(0.5, 0.1)}
    assert allocation.clients["client-03"].threads == 4


def test_half_an_override_leaves_the_other_half_alone() -> None:
    config = ResourcesConfig(client_cpus=0.5)
    allocation = allocate(CLIENTS, [gpu_node(1)], config, {"client-00": ClientOverrides(gpus=0)})
    assert allocation.clients["client-00"].cpus == 0.5
    assert allocation.clients["client-00"].gpus == 0
    assert allocation.clients["client-01"].gpus > 0


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (ResourcesConfig(client_gpus=1), "client-00 asks for 1 GPU"),
        (ResourcesConfig(client_cpus=3), "client-00 asks for 3 CPU"),
        (ResourcesConfig(server_cpus=4), "the server asks for 4 CPU"),
        (ResourcesConfig(server_gpus=0.5), "the server asks for 0.5 GPU"),
        (ResourcesConfig(client_cpus=1, server_cpus=0.5), "10 clients ask for 1 CPU each, but only 2 such shares fit"),
        (ResourcesConfig(client_cpus=0.2, server_cpus=0.5), "10 clients and the server ask for 2.5 CPU together"),
        (ResourcesConfig(client_gpus=1.5), "client-00 asks for 1.5 GPUs; above 1 only whole numbers"),
    ],
)
def test_what_cannot_be_had_is_refused_saying_what_was_asked_and_what_there_is(
    config: ResourcesConfig, asked: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        allocate(CLIENTS, [LAPTOP], config)
    message = str(caught.value)
    assert message.startswith(asked)
    assert "laptop: 2 CPU, 0 GPU" in message or "whole numbers" in message


def test_a_wish_that_cannot_be_granted_names_its_client() -> None:
    with pytest.raises(ResourceError, match=r"client-07 asks for 2 GPU; the cluster has laptop: 2 CPU, 0 GPU"):
        allocate(CLIENTS, [LAPTOP], ResourcesConfig(), {"client-07": ClientOverrides(gpus=2)})


def test_auto_shares_what_fixed_numbers_leave() -> None:
    wishes = {"client-00": ClientOverrides(cpus=1.5)}
    allocation = allocate(CLIENTS, [LAPTOP], ResourcesConfig(), wishes)
    everyone = [*allocation.clients.values(), allocation.server]
    assert sum(units(share.cpus) for share in everyone) <= 20_000
    assert min(share.cpus for share in everyone) == 0.05


def test_clients_bound_to_a_node_fit_there_even_if_all_others_come_too() -> None:
    nodes = [
        NodeResources("1", "a", 4, 0, {"site": "a"}),
        NodeResources("2", "b", 1, 0, {"site": "b"}),
    ]
    wishes = {name: ClientOverrides(label_selector={"site": "b"}) for name in CLIENTS[:4]}
    allocation = allocate(CLIENTS, nodes, ResourcesConfig(), wishes)
    assert 4 * units(allocation.clients[CLIENTS[0]].cpus) <= 10_000
    assert 11 * units(allocation.server.cpus) <= 10_000


def test_a_label_that_no_node_has_is_refused() -> None:
    wishes = {"client-01": ClientOverrides(label_selector={"site": "moon"})}
    with pytest.raises(ResourceError, match=r"client-01 wants a node with labels .*moon.*laptop"):
        allocate(CLIENTS, [LAPTOP], ResourcesConfig(), wishes)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ("a", True),
        ("b", False),
        ("!a", False),
        ("!b", True),
        ("in(a, b)", True),
        ("in(b,c)", False),
        ("!in(b,a)", False),
    ],
)
def test_a_label_selector_reads_as_rays(wanted: str, fits: bool) -> None:
    assert matches({"site": wanted}, {"site": "a", "other": "b"}) is fits


def test_a_selector_asks_for_all_its_labels_and_an_empty_one_for_none() -> None:
    assert matches({}, {})
    assert matches({"site": "a", "kind": "gpu"}, {"site": "a", "kind": "gpu"})
    assert not matches({"site": "a", "kind": "gpu"}, {"site": "a"})


def test_a_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(ResourceError, match="the cluster has no node"):
        allocate(CLIENTS, [], ResourcesConfig())


@pytest.mark.parametrize(
    ("assigned", "share", "cuda", "expected"),
    [
        ([], 0.0, False, DeviceChoice("cpu", None)),
        ([], 0.0, True, DeviceChoice("cpu", None)),  # a visible GPU that belongs to others
        ([0], 0.25, True, DeviceChoice("cuda:0", 0.25)),
        ([3], 1.0, True, DeviceChoice("cuda:0", 1.0)),
        ([1, 2], 2.0, True, DeviceChoice("cuda:0", 1.0)),
    ],
)
def test_the_device_is_what_was_assigned(assigned: list[int], share: float, cuda: bool, expected: DeviceChoice) -> None:
    assert choose_device(assigned, share, cuda) == expected


def test_an_assigned_gpu_that_torch_does_not_see_is_warned_of() -> None:
    choice = choose_device([0], 0.5, cuda_available=False)
    assert (choice.device, choice.memory_fraction) == ("cpu", None)
    assert "torch sees none" in (choice.warning or "")


def test_a_client_bound_to_a_node_without_gpus_takes_none_from_the_others() -> None:
    nodes = [NodeResources("a", "a", 4, 1), NodeResources("b", "b", 4, 0, {"fl-site": "b"})]
    wishes = {"client-00": ClientOverrides(label_selector={"fl-site": "b"})}
    allocation = allocate(client_ids(3), nodes, ResourcesConfig(), wishes)
    assert allocation.clients["client-00"].gpus == 0
    assert allocation.clients["client-01"].gpus == allocation.server.gpus == pytest.approx(1 / 3, abs=1e-4)


def test_selectors_that_overlap_are_counted_together() -> None:
    nodes = [NodeResources(site, site, 4, 1, {"fl-site": site}) for site in "ab"]
    wishes = {
        f"client-0{i}": ClientOverrides(label_selector={"fl-site": "a" if i < 2 else "in(a,b)"}) for i in range(4)
    }
    allocation = allocate(client_ids(4), nodes, ResourcesConfig(), wishes)
    # The server and the pair that may choose can all end up at a: five must fit on its one GPU.
    assert {share.gpus for share in allocation.clients.values()} == {0.2}


def test_equal_shares_that_would_straddle_are_refused() -> None:
    with pytest.raises(ResourceError, match=r"3 clients ask for 0\.6 GPU each, but only 2 such shares fit"):
        allocate(client_ids(3), [gpu_node(2)], ResourcesConfig(client_gpus=0.6, server_gpus=0))
