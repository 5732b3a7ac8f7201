"""The entry point of the command `kvlane`: Ctrl-C ends it with code 130, also while it loads."""

from __future__ import annotations


def main() -> None:
    try:
        from kvlane.app.cli import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
