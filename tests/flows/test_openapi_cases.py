"""Requests that schemathesis makes from the OpenAPI document, and the answers of a deployment.

No answer is a server error or contradicts the document. KVLANE_TEST_LONG=1 sends 5000 requests or
more.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import openai
import pytest

from kvlane.testing import ScriptedEngine, memory_deployment
from tests.harness.schema_hooks import KNOWN_ID, MODEL

LONG = bool(os.environ.get("KVLANE_TEST_LONG"))
LEAST_CASES = 5000 if LONG else 100
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance",
)  # fmt: skip
HOOKS = Path(__file__).parents[1] / "harness" / "schema_hooks.py"


@pytest.mark.timeout(3600 if LONG else 300)
async def test_answers_are_those_of_the_document(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    more = (
        ["--max-examples=200", "--phases=coverage,fuzzing"]
        if LONG
        else ["--max-examples=5", "--phases=fuzzing"]
    )
    async with memory_deployment(ScriptedEngine(lambda text: text[:20] or "none")) as deployment:
        async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="-") as ai:
            known = await ai.responses.create(model=MODEL, input="hello")
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "schemathesis"), "run",
            f"{deployment.url}/openapi.json", f"--checks={','.join(CHECKS)}", "--seed=1",
            "--no-color", "--request-timeout=20", "--warnings=off", "--no-shrink",
            "--continue-on-failure", "--generation-database=none",
            f"--report-json-path={report}", *more,
            env=os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS), KNOWN_ID: known.id},
            stdout=asyncio.subprocess.PIPE, cwd=tmp_path,
        )  # fmt: skip
        shown, _ = await process.communicate()
    assert process.returncode == 0, shown.decode()
    assert json.loads(report.read_text())["test_cases"]["generated"] >= LEAST_CASES
