"""Processes and decisions. `app:app` is every process in one; nothing is imported until asked for."""


def __getattr__(name: str) -> object:
    if name == "app":
        from app.standalone import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
