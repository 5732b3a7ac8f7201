"""Tests of the live screen of `kvlane top` on a pseudo-terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
from rich.console import Console

from kvlane.app.commands.fleet.live_screen import show_live


@contextmanager
def on_a_terminal() -> Iterator[tuple[int, TextIO]]:
    """The other side of the terminal of this process, and the terminal. No fixture: pytest sets
    the standard output again before the test."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", terminal)
        patch.setattr(sys, "stdout", terminal)
        yield ours, terminal
    os.close(ours)


async def test_screen_is_drawn_until_q() -> None:
    drawn = asyncio.Event()

    async def frame() -> str:
        drawn.set()
        return "all ready"

    with on_a_terminal() as (ours, terminal):
        before = termios.tcgetattr(terminal)
        console = Console(file=terminal, force_terminal=True, width=80, height=24)
        showing = asyncio.create_task(show_live(console, frame))
        await drawn.wait()
        os.write(ours, b"x")
        await asyncio.sleep(0.05)
        assert not showing.done(), "another key"
        os.write(ours, b"q")
        await asyncio.wait_for(showing, 10)
        assert b"all ready" in os.read(ours, 65536)
        assert termios.tcgetattr(terminal) == before


async def test_error_of_a_frame_ends_the_screen() -> None:
    async def frame() -> str:
        raise RuntimeError("reading has ended")

    with on_a_terminal() as (_, terminal), pytest.raises(RuntimeError, match="reading has ended"):
        await show_live(Console(file=terminal, force_terminal=True), frame)
