"""Check of an installed wheel: one top-level name, no tools, and all public names."""

from importlib import metadata

import kvlane
import kvlane.testing

files = metadata.files("kvlane") or []
names = {file.parts[0] for file in files if ".." not in file.parts}
others = {name for name in names if not name.startswith("kvlane")}
assert not others, f"the wheel installs {sorted(others)} at the top level"
assert "site-packages" in (kvlane.__file__ or ""), f"not the wheel: {kvlane.__file__}"
parts = {part for file in files for part in file.parts}
assert not parts & {"workbench", "bench", "reference_index.py"}, "the wheel has tools"
assert {"py.typed", "NOTICE"} <= parts, "the wheel lacks files"
for module in (kvlane, kvlane.testing):
    for name in module.__all__:
        getattr(module, name)
print(f"{len(files)} files below kvlane, {len(kvlane.__all__)} public names")
