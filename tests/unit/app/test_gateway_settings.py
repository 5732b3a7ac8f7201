"""Tests of the settings of a gateway."""

import pytest

from kvlane.app.settings import Settings, SettingsError


def test_gateway_listens_on_loopback_by_default() -> None:
    assert Settings().http_host == "127.0.0.1"


def test_gateways_are_numbered_from_zero() -> None:
    assert Settings(gateway_count=3, gateway_index=2).gateway_index == 2
    with pytest.raises(SettingsError, match="KVLANE_GATEWAY_INDEX=3 counts from 0"):
        Settings(gateway_count=3, gateway_index=3)


def test_every_gateway_has_a_lane() -> None:
    with pytest.raises(SettingsError, match="KVLANE_GATEWAY_COUNT=5 exceeds KVLANE_LANES=4"):
        Settings(gateway_count=5, lanes=4)


def test_gateways_with_one_secret_accept_each_others_stream_ids() -> None:
    drawn = "01900000-0000-7000-8000-000000000000"
    sealed = Settings(stream_secret="s3cret").tenant_tag().tagged(drawn, "acme")
    assert (
        Settings(stream_secret="s3cret", http_host="0.0.0.0").tenant_tag().matches(sealed, "acme")
    )
    assert not Settings(stream_secret="other").tenant_tag().matches(sealed, "acme")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_without_a_secret_gateways_of_one_deployment_on_loopback_agree(host: str) -> None:
    drawn = "01900000-0000-7000-8000-000000000000"
    sealed = Settings(http_host=host).tenant_tag().tagged(drawn, "")
    assert Settings().tenant_tag().matches(sealed, "")
    assert not Settings(topic_prefix="another.").tenant_tag().matches(sealed, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example"])
def test_reachable_gateway_needs_a_secret(host: str) -> None:
    with pytest.raises(SettingsError, match="set KVLANE_STREAM_SECRET"):
        Settings(http_host=host).tenant_tag()
