"""Tests of the command line, with the log in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvlane.app.cli import app
from kvlane.app.text.byte_level import encode_bytes as tokens_of
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import encode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.records import Chunk, End
from kvlane.streams.topics import PROMPTS, RESPONSES, lane_of
from tests.harness.memory_commands import connect_commands
from workbench.bench.report import Report, Threshold

COMMANDS = [
    [], ["demo"], ["up"], ["publish"], ["follow"], ["cancel"], ["settings"], ["asyncapi"],
    ["status"], ["top"], ["workers"], ["models"], ["requests"], ["queue"], ["rehearse"],
    ["explain"], ["replay"], ["verify-decisions"], ["simulate"],
    ["topics"], ["topics", "skip"], ["topics", "create"], ["topics", "describe"],
    ["keys"], ["keys", "create"], ["keys", "list"], ["keys", "revoke"], ["keys", "limit"],
    ["dead-letters"], ["dead-letters", "list"], ["dead-letters", "show"], ["dead-letters", "retry"],
    ["bench"],
    ["bench", "faults"], ["bench", "router-latency"], ["bench", "tokens"], ["bench", "gateway"],
    ["bench", "attach"],
    ["bench", "rebuild"], ["bench", "index"], ["bench", "simulate"], ["bench", "routers"],
    ["bench", "decision"],
    ["bench", "all"],
]  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLANE_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    return connect_commands(MemoryBroker(SystemClock(), lanes=4), monkeypatch)


def kvlane(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=given)


def prompts(broker: MemoryBroker) -> list[dict[str, Any]]:
    records = [r for p in range(broker.partitions[PROMPTS]) for r in broker.records(PROMPTS, p)]
    return [json.loads(r.value or b"") for r in records]


def answer(broker: MemoryBroker, request_id: str, *texts: str, end: End | None = None) -> None:
    """What readers of this request see."""
    lane, index, chars = lane_of(request_id, broker.partitions[RESPONSES]), 0, 0
    for seq, text in enumerate(texts):
        last = end is None and seq == len(texts) - 1
        chars += len(text)
        chunk = Chunk(
            id=request_id,
            attempt=0,
            run="1",
            seq=seq,
            index=index,
            token_ids=tuple(tokens_of(text)),
            text=text,
            chars=chars,
            finish_reason="stop" if last else None,
        )
        index += len(chunk.token_ids)
        broker.append(RESPONSES, lane, [encode(chunk, request_id)])
    if end is not None:
        broker.append(RESPONSES, lane, [encode(end, request_id)])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    result = kvlane(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_tab_completes_a_command() -> None:
    tab = {"_KVLANE_COMPLETE": "complete_bash", "COMP_WORDS": "kvlane expl", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], prog_name="kvlane", env=tab).stdout.split() == ["explain"]


def test_prompt_is_published_and_its_id_printed(memory: MemoryBroker) -> None:
    result = kvlane("publish", "hello", "--system", "be brief", "--max-tokens", "5")
    assert result.exit_code == 0, result.output
    (prompt,) = prompts(memory)
    assert result.stdout.split() == [prompt["id"]]
    assert prompt["body"] == {
        "max_tokens": 5,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
        ],
    }


def test_prompt_may_come_from_standard_input(memory: MemoryBroker) -> None:
    assert kvlane("publish", "--id", "mine", given="hello\nthere").stdout == "mine\n"
    (prompt,) = prompts(memory)
    assert prompt["body"]["messages"][0]["content"] == "hello\nthere"


def test_empty_prompt_is_refused_in_one_line(memory: MemoryBroker) -> None:
    result = kvlane("publish", given=" \n")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: the prompt is empty: give it as an argument or on standard input"
    ]
    assert not prompts(memory)


@pytest.mark.parametrize("limit", ["0", "-1", "2147483648"])
def test_limit_that_no_answer_can_have_is_refused(memory: MemoryBroker, limit: str) -> None:
    result = kvlane("publish", "--max-tokens", limit, "hello")
    assert result.exit_code == 2
    assert "--max-tokens" in result.stderr
    assert prompts(memory) == []


def test_file_brings_many_prompts_with_ids_or_without(memory: MemoryBroker, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id":"a","body":{}}\n\n{"kind":"completion","body":{"prompt":"x"}}\n')
    result = kvlane("publish", "--file", str(file))
    ids = {p["id"] for p in prompts(memory)}
    assert set(result.stdout.split()) == ids
    assert "a" in ids
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nonsense", "line 2 is not a JSON object"),
        ("[]", "line 2 is not a JSON object"),
        ('{"kind":"sing"}', "line 2, kind: "),
    ],
)
def test_bad_line_is_named_and_nothing_is_published(
    memory: MemoryBroker, line: str, named: str
) -> None:
    result = kvlane("publish", "--file", "-", given=f'{{"id":"a"}}\n{line}\n')
    assert result.exit_code == 1
    assert named in result.stderr
    assert not prompts(memory)


def test_follow_shows_the_text(memory: MemoryBroker) -> None:
    answer(memory, "a", "Hel", "lo ", "wörld")
    result = kvlane("follow", "a")
    assert (result.exit_code, result.stdout) == (0, "Hello wörld\n")


def test_follow_skips_the_text_before_an_offset(memory: MemoryBroker) -> None:
    answer(memory, "a", "Hel", "lo ", "wörld")
    assert kvlane("follow", "a", "--from", "3").stdout == "lo wörld\n"


def test_request_that_a_router_ended_is_an_error_with_its_reason(memory: MemoryBroker) -> None:
    answer(memory, "a", "Hel", end=End(id="a", code="deadline", message="too slow"))
    result = kvlane("follow", "a")
    assert (result.exit_code, result.stdout) == (1, "Hel\n")
    assert result.stderr == "a ended: deadline: too slow\n"


def test_completed_answer_is_no_error(memory: MemoryBroker) -> None:
    answer(memory, "a", "Hello", end=End(id="a", code="stop"))
    assert kvlane("follow", "a").exit_code == 0


def test_waiting_ends_with_the_time_out(memory: MemoryBroker) -> None:
    result = kvlane("follow", "a", "--timeout", "0.3")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: a: no end within 0.3 s")


def test_unpublished_id_is_an_error_at_once(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlane.app.commands.request_commands.CHECK_AFTER_S", 0.1)
    result = kvlane("follow", "nosuch")
    assert result.exit_code == 1
    assert "error: nosuch: no record has this id" in result.stderr
    awaited = kvlane("follow", "nosuch", "--timeout", "0.5")
    assert awaited.exit_code == 1
    assert "no record has this id" in awaited.stderr
    assert "no end within 0.5 s" in awaited.stderr


def test_id_that_is_too_old_is_reported(memory: MemoryBroker) -> None:
    result = kvlane("follow", "018bcfe5-6800-7c02-9d41-0123456789ab")
    assert result.exit_code == 1
    assert "records older than 24 h are deleted" in result.stderr


def test_truncated_stream_is_reported(memory: MemoryBroker) -> None:
    answer(memory, "a", "Hel", "lo ", "wörld")
    memory.delete_records(RESPONSES, lane_of("a", 4), 1)
    result = kvlane("follow", "a")
    assert result.exit_code == 1
    assert "a: the beginning of its stream is no longer retained" in result.stderr


def test_waiting_prompt_is_awaited(memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlane.app.commands.request_commands.CHECK_AFTER_S", 0.1)
    kvlane("publish", "hello", "--id", "a")
    result = kvlane("follow", "a", "--timeout", "0.5")
    assert result.stderr.startswith("error: a: no end within 0.5 s")


def test_id_is_escaped_for_the_terminal(memory: MemoryBroker) -> None:
    answer(memory, "a\nb\x1b[2J", "hello")
    result = kvlane("publish", "hello", "--id", "a\nb\x1b[2J", "--follow")
    assert (result.stdout, result.stderr) == ("hello\n", "a\\nb\\x1b[2J\n")
    assert kvlane("publish", "hello", "--id", "c\nd").stdout == "c\\nd\n"


def test_publish_can_follow(memory: MemoryBroker) -> None:
    answer(memory, "a", "answer")
    result = kvlane("publish", "hello", "--id", "a", "--follow")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "answer\n", "a\n")


def test_several_choices_are_labelled(memory: MemoryBroker) -> None:
    answer(memory, "a", "one")
    answer(memory, "b", "two")
    lines = '{"id":"a"}\n{"id":"b"}\n'
    assert kvlane("publish", "-f", "-", "--follow", given=lines).stdout == "a\tone\nb\ttwo\n"


def test_cancel_is_published_behind_its_prompt(memory: MemoryBroker) -> None:
    kvlane("publish", "hello", "--id", "a")
    assert kvlane("cancel", "a").exit_code == 0
    assert [p.get("kind", "chat") for p in prompts(memory)] == ["chat", "cancel"]


@pytest.mark.parametrize(
    "command", [["publish", "x"], ["follow", "a"], ["cancel", "a"], ["topics", "describe"]]
)
def test_missing_servers_error_names_the_variable(command: list[str]) -> None:
    result = kvlane(*command)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: KVLANE_BOOTSTRAP_SERVERS is not set")
    assert "Traceback" not in result.output


def test_unreachable_kafka_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLANE_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    result = kvlane("follow", "a")
    assert result.exit_code == 1
    assert "error: no Kafka at" in result.stderr
    assert "Check KVLANE_BOOTSTRAP_SERVERS" in result.stderr


def test_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLANE_LANES", "many")
    result = kvlane("follow", "a")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: KVLANE_LANES=many: ")


@pytest.mark.parametrize("command", ["up", "demo"])
def test_command_that_makes_topics_refuses_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("KVLANE_REPLICATON_FACTOR", "3")
    result = kvlane(command, "--broker", "env")
    assert result.exit_code == 1
    assert "did you mean KVLANE_REPLICATION_FACTOR?" in result.stderr


def test_debug_shows_where_an_error_came_from() -> None:
    result = kvlane("--debug", "follow", "a")
    assert type(result.exception).__name__ == "SettingsError"


def test_up_needs_a_worker_that_decodes() -> None:
    up = ("up", "--workers", "2", "--broker", "env")
    result = kvlane(*up, "--prefill-workers", "2")
    assert result.exit_code == 2
    assert "--prefill-workers 2 of --workers 2 leaves no worker to decode" in result.stderr
    result = kvlane(*up, "--prefill-workers", "1")
    assert result.exit_code == 1
    assert "KVLANE_BOOTSTRAP_SERVERS" in result.stderr


def test_settings_shows_variables_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLANE_LANES", "77")
    result = kvlane("settings")
    assert result.exit_code == 0
    assert "KVLANE_LANES" in result.stdout
    assert "77" in result.stdout


def test_demo_fails_when_a_text_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlane.app.demo.demo_run.run_demo", lambda *_, **__: False)
    assert kvlane("demo", "hello", "--broker", "memory").exit_code == 1


def test_bench_faults_reports_in_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    result = kvlane("bench", "faults", "--seeds", "2", "--jobs", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["bench"] == "faults"
    assert report["rows"][0]["seeds"] == 2
    assert report["thresholds"][0]["passed"] is True
    assert report["machine"]["cpus"]


def test_bench_of_real_routers_plays_no_trace(tmp_path: Path) -> None:
    result = kvlane("bench", "routers", "--kafka", "--trace", str(tmp_path / "trace"))
    assert result.exit_code == 2
    assert "--trace" in result.stderr


def test_bench_of_real_routers_fails_when_one_of_them_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wrong(*_: object) -> Report:
        return Report("routers", [], [Threshold("unlike the log", 1, "", "0", passed=False)])

    monkeypatch.setattr("workbench.bench.routing.routers_kafka.bench_kafka_routers", wrong)
    assert kvlane("bench", "routers", "--kafka").exit_code == 1


def test_simulate_shows_a_row_for_each_policy_and_seed(tmp_path: Path) -> None:
    file = tmp_path / "simulate.json"
    sent = ("--policy", "dynamo:16,round_robin", "--workers", "2", "--speed", "4", "--seeds", "2")
    result = kvlane("simulate", *sent, "--json", str(file))
    assert result.exit_code == 0, result.output
    *_, heading, first, second, third, _, _ = result.stdout.splitlines()
    assert heading.split()[:5] == ["policy", "seed", "reuse", "TTFT", "ms"]
    assert [row.split()[:2] for row in (first, second, third)] == [
        ["dynamo:16", "0"],
        ["dynamo:16", "1"],
        ["round_robin", "0"],
    ]
    assert max(len(row.rstrip()) for row in (heading, first, second, third)) <= 80
    rows = json.loads(file.read_text())["rows"]
    assert [(r["policy"], r["seed"]) for r in rows] == [
        ("dynamo:16", 0), ("dynamo:16", 1), ("round_robin", 0), ("round_robin", 1),
    ]  # fmt: skip
    assert all((r["workers"], r["speed"], r["requests"]) == (2, 4.0, 300) for r in rows)
    assert rows[0]["ttft_ms"]["mean"] < rows[2]["ttft_ms"]["mean"]
    assert rows[2]["e2e_ms"] == rows[3]["e2e_ms"]


def test_simulate_names_unplayable_requests(tmp_path: Path) -> None:
    unknown = kvlane("simulate", "--policy", "best")
    assert unknown.exit_code == 2
    assert "round_robin" in unknown.stderr
    absent = kvlane("simulate", "--trace", str(tmp_path / "absent"))
    assert absent.exit_code == 1
    assert absent.stderr.startswith("error: ")
    small = kvlane("simulate", "--blocks", "4")
    assert small.exit_code == 1
    assert "fits no worker" in small.stderr


@pytest.mark.parametrize(
    "words",
    [
        "settings", "size", "keys list", "dead-letters list", "replay --view load", "usage",
        "usage --budgets", "explain job-1", "explain --waiting", "verify-decisions -1h",
        "simulate --trace gen:short-prompts --requests 5 --policy random --workers 2",
    ],
)  # fmt: skip
def test_json_on_standard_output_comes_alone(
    words: str, memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLANE_API_KEYS_FILE", str(tmp_path / "keys.json"))
    assert kvlane("keys", "create", "--tenant", "acme").exit_code == 0
    answer(memory, "job-1", "a")
    shown = kvlane(*words.split(), "--json", "-")
    assert shown.exit_code == 0, shown.output
    json.loads(shown.stdout)


def test_usage_writes_one_form_to_standard_output() -> None:
    result = CliRunner().invoke(app, ["usage", "--csv", "-", "--json", "-"])
    assert result.exit_code == 2
    assert "not both" in result.output
