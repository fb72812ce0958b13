"""What people hear of their clients' classes before the first round."""

from fedppd_ray.federation.concerns import concerns
from fedppd_ray.federation.types import ClientInfo


def client(name: str, *holds: bool) -> ClientInfo:
    return ClientInfo(name, 10, (), holds)


def test_a_class_of_one_client_is_named_with_what_it_may_be_instead() -> None:
    clients = [client("a", False, True, True), client("b", True, False, True), client("c", False, True, True)]
    (line,) = concerns(("boat", "ship", "plane"), clients, (1, 1, 1))
    assert line.startswith("only b holds 'boat'")
    assert "it alone has no 'ship': is it the same under another name?" in line


def test_two_spellings_are_named_with_the_client_that_has_the_rare_one() -> None:
    clients = [client("a", True, False), client("b", True, True), client("c", True, False)]
    found = concerns(("pneumonia", "pnuemonia"), clients, (3, 3))
    assert any("'pnuemonia' and 'pneumonia' are two classes, spelt almost alike, at b" in line for line in found)


def test_case_and_dashes_alone_make_no_class() -> None:
    everybody = [client("a", True, True), client("b", True, True)]
    (line,) = concerns(("well-done", "Well done"), everybody, (3, 3))
    assert "spelt almost alike:" in line


def test_words_that_are_alike_by_nature_are_left_in_peace() -> None:
    for classes in (("grade 1", "grade 2"), ("cat", "bat"), ("healthy", "unhealthy")):
        assert concerns(classes, [client("a", True, True), client("b", True, True)], (3, 3)) == []


def test_a_class_without_test_rows_is_named() -> None:
    (line,) = concerns(("x", "y"), [client("a", True, True), client("b", True, True)], (3, 0))
    assert line == "no test row is 'y': no figure will say how well it is told"


def test_of_clients_that_keep_their_classes_to_themselves_nothing_is_said() -> None:
    assert concerns(("x", "y"), [client("a"), client("b", True, True), client("c")], (1, 1)) == []
