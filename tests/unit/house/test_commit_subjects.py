"""Tests of the commit hook: the form of subjects."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[3] / ".githooks"


@pytest.mark.parametrize(
    ("subject", "refusal"),
    [
        ("Give replies their topic", ""),
        ("Give " + "ä" * 67, ""),
        ("fixup! " + "x" * 90, ""),
        ("Give " + "x" * 68, "the subject has 73 characters, at most 72"),
        ("Give replies their topic.", "ends with a full stop"),
    ],
)
def test_commit_with_a_subject_of_another_form_is_refused(
    tmp_path: Path, subject: str, refusal: str
) -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.run(
            ["git", *identity, "-c", f"core.hooksPath={HOOKS}", "-C", str(tmp_path), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    assert git("init", "-q").returncode == 0
    made = git("commit", "-q", "--allow-empty", "-m", f"{subject}\n\nThe reason.")
    assert (made.returncode == 0) == (not refusal)
    assert refusal in made.stderr
