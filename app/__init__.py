"""The processes of kvlane. `app:app` runs all in one process; nothing is imported until then."""


def __getattr__(name: str) -> object:
    if name == "app":
        from app.standalone import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
