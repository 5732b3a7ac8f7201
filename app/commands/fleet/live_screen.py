"""Live screen of `kvlane top`: drawn anew every second, until `q` or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live

FRAME_S = 1.0

Frame = Callable[[], Awaitable[RenderableType]]


async def show_live(console: Console, frame: Frame) -> None:
    """Draw frames until the end; without a terminal a single one. Raises the errors of `frame`."""
    if not sys.stdout.isatty():  # forced colours make the console a terminal
        console.print(await frame())
        return
    ended = asyncio.Event()
    with _keys(ended), Live(console=console, screen=True, auto_refresh=False) as live:
        drawing = asyncio.create_task(_draw(live, frame))
        waiting = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({drawing, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if drawing.done():
                drawing.result()
        finally:
            for task in (drawing, waiting):
                task.cancel()
            await asyncio.gather(drawing, waiting, return_exceptions=True)


async def _draw(live: Live, frame: Frame) -> None:
    while True:
        live.update(await frame(), refresh=True)
        await asyncio.sleep(FRAME_S)


@contextlib.contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """Set the event at `q` and at Ctrl-C, which raises nothing meanwhile."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, ended.set)
    try:
        if not sys.stdin.isatty():
            yield
            return
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)

        def on_key() -> None:
            typed = os.read(keyboard, 64)
            if not typed or b"q" in typed.lower():
                ended.set()

        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, on_key)
        try:
            yield
        finally:
            loop.remove_reader(keyboard)
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
