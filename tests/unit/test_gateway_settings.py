import pytest

from app.settings import Settings, SettingsError


def test_a_gateway_listens_on_loopback_unless_told_otherwise() -> None:
    assert Settings().http_host == "127.0.0.1"


def test_gateways_are_numbered_from_zero() -> None:
    assert Settings(gateways=3, gateway_number=2).gateway_number == 2
    with pytest.raises(SettingsError, match="KVLANE_GATEWAY_NUMBER=3 counts from 0"):
        Settings(gateways=3, gateway_number=3)


def test_every_gateway_has_a_lane() -> None:
    with pytest.raises(SettingsError, match="KVLANE_GATEWAYS=5 exceeds KVLANE_LANES=4"):
        Settings(gateways=5, lanes=4)
