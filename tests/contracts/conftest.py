"""The contracts with aiokafka as it is (`KVLANE_TEST_PLAIN_CLIENT=1`).

Its version counts as untested then. The promises that do not hold are left out by name;
docs/kafka-client.md has them too.
"""

from __future__ import annotations

import os

import pytest

from kvlane.streams.kafka.client_patches import client_parts

PROMISES_OF_REPLACED_PARTS = {
    "test_member_cut_off_from_its_coordinator_gives_up_before_another_takes_over": "no lease",
    "test_member_cut_off_from_its_coordinator_gives_up_without_being_polled": "no lease",
    "test_member_of_a_stopped_process_loses_its_lanes_before_its_tasks_go_on": "no lease",
    "test_member_that_is_not_polled_loses_its_lanes": "a cancelled poll counts as pending",
    "test_positions_pass_what_transactions_leave_in_the_log": "no position without a record",
    "test_fetch_lists_no_partition_while_nothing_changes": "no fetch sessions",
}


def pytest_configure() -> None:
    if os.environ.get("KVLANE_TEST_PLAIN_CLIENT"):
        client_parts.TESTED_VERSIONS = frozenset()
        client_parts.client_parts.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("KVLANE_TEST_PLAIN_CLIENT"):
        return
    for item in items:
        name = item.name.partition("[")[0]
        if reason := PROMISES_OF_REPLACED_PARTS.get(name):
            item.add_marker(pytest.mark.skip(reason=reason))
