"""Add the packages of Debian to a bill of materials (CycloneDX), which pip's tool does not know.

dpkg-query -W -f '${Package} ${Version} ${Architecture}\\n' | add_os_packages.py sbom.cdx.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote


def with_packages(bill: dict[str, Any], lines: Iterable[str]) -> dict[str, Any]:
    """The bill with a component for each line `name version architecture`. Raises ValueError for
    any other line."""
    components = []
    for line in sorted(lines):
        name, version, architecture = line.split()
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}"
        components.append(
            {"bom-ref": purl, "name": name, "purl": purl, "type": "library", "version": version}
        )
    return {**bill, "components": [*bill.get("components", ()), *components]}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    bill = with_packages(json.loads(path.read_text("utf-8")), sys.stdin)
    path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n", "utf-8")
