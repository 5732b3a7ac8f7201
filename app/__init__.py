"""Processes and decisions. `app:app` is all of them in one; nothing is imported before that."""


def __getattr__(name: str) -> object:
    if name == "app":
        from app.standalone import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
