"""The processes of kvlane. `app:app` runs all in one process; nothing is imported until then.

In a checkout this folder is importable as `app` too, for `faststream run app.router:app`.
"""


def __getattr__(name: str) -> object:
    if name == "app":
        from kvlane.app.standalone import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "app":
    from kvlane.app.runtime import checkout_names

    checkout_names.install()
