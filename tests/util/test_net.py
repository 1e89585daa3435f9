import pytest

from bftrainer.util.net import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_an_address_of_the_machine_itself_is_a_loopback_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "fe80::1", "node-1", "localhost.example", ""])
def test_any_other_address_or_name_is_none(host: str) -> None:
    assert not is_loopback(host)
