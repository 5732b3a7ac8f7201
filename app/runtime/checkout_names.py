"""Names of modules in a checkout: `app.router` is `kvlane.app.router`, and is loaded once.

`faststream run app.router:app` imports from the folder `app/`; a second copy of a module would have
other classes, metrics and caches.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType


class CheckoutNames(MetaPathFinder, Loader):
    """Finder and loader of `app.NAME`: the module `kvlane.app.NAME` takes its place."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname.startswith("app.") else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = import_module(f"kvlane.{name}")


def install() -> None:
    """Let `app` and `app.NAME` name the modules of `kvlane.app` in this process."""
    sys.meta_path.insert(0, CheckoutNames())
    sys.modules["app"] = sys.modules["kvlane.app"]
