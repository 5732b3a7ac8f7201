"""Tests of machine code of kernels: compiled once, kept where it can be, never when it is
needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvlane.indexer import kernels, precompile

ROOT = Path(__file__).resolve().parents[3]
HASH = "from kvlane.indexer.block_hashes import local_hashes; print(local_hashes(range(12), 4)[0])"
STATS = """
import sys
from kvlane.indexer.precompile import compile_all
compile_all()
found = {
    id(each): each for name, module in list(sys.modules.items())
    if name.startswith("kvlane.")
    for each in vars(module).values() if hasattr(each, "stats")
}
kept = [each for each in found.values() if each.targetoptions.get("nogil")]
print(sum(sum(each.stats.cache_misses.values()) for each in kept))
print(sum(sum(each.stats.cache_hits.values()) for each in kept))
print(sum(len(each.signatures) for each in kept))
print(*[each.py_func.__qualname__ for each in kept if not each.signatures])
"""


COMPILE_TIMEOUT_S = 550
"""All kernels take 50 s alone on two slow cores, and beside other tests several times as long."""


def output_of(code: str, **environment: str) -> tuple[list[str], str]:
    """The lines on stdout, and stderr, of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=COMPILE_TIMEOUT_S,
    )
    return done.stdout.split(), done.stderr


def test_second_process_compiles_nothing() -> None:
    output_of(STATS)
    (misses, hits, compiled, *_), output = output_of(STATS)
    assert int(misses) == 0
    assert int(hits) == int(compiled) > 0
    assert output == ""


@pytest.mark.timeout(600)
def test_no_kernel_is_left_to_be_compiled_later(tmp_path: Path) -> None:
    # Elsewhere, what a kernel calls comes with it from the folder, and does not count as compiled.
    (misses, *_, compiled), _ = output_of(STATS, KVLANE_KERNEL_CACHE_DIR=str(tmp_path))
    assert int(misses) > 0
    assert compiled.isdecimal(), f"{compiled} is not called at the start"


def test_kernels_run_with_a_warning_without_a_writable_folder(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    (first,), output = output_of(HASH, KVLANE_KERNEL_CACHE_DIR=str(in_the_way / "below"))
    assert first == "9143094415614847814"
    assert str(in_the_way) in output
    assert "KVLANE_KERNEL_CACHE_DIR" in output
    assert "compiling the kernels" in output


def test_process_leaves_no_folder_of_its_own_behind(tmp_path: Path) -> None:
    output_of(HASH, KVLANE_KERNEL_CACHE_DIR="/dev/null/below", TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_kernels_work_without_any_writable_folder() -> None:
    nowhere = "import tempfile; tempfile.mkdtemp = lambda **_: open('/dev/null/below');"
    (first,), _ = output_of(nowhere + HASH, KVLANE_KERNEL_CACHE_DIR="/dev/null/below")
    assert first == "9143094415614847814"


# --- where the code is kept ----------------------------------------------------------------------


def test_first_writable_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert kernels.choose_cache_folder([tmp_path / "file" / "a", tmp_path / "b"]) == tmp_path / "b"


def test_complete_folder_that_is_read_only_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "is_writable", lambda _: False)
    (tmp_path / kernels.COMPLETE_MARKER).touch()
    (tmp_path / "code").write_bytes(b"machine code")
    copy = kernels.choose_cache_folder([tmp_path / "missing", tmp_path])
    assert copy is not None
    assert copy != tmp_path
    assert (copy / "code").read_bytes() == b"machine code"


def test_setting_names_the_only_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.CACHE_VARIABLE, "/somewhere")
    assert kernels.cache_roots() == [Path("/somewhere")]


def test_virtual_environment_precedes_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setattr(sys, "prefix", "/environment")
    assert kernels.cache_roots() == [
        Path("/environment/var/kvlane-kernels"),
        Path("/caches/kvlane/kernels"),
    ]


def test_kernels_are_in_the_home_directory_without_a_virtual_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(kernels.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert kernels.cache_roots() == [Path("/home/somebody/.cache/kvlane/kernels")]


# --- what it depends on --------------------------------------------------------------------------


def test_another_processor_has_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    here = kernels.dependency_hash()
    monkeypatch.setattr(kernels.binding, "get_host_cpu_name", lambda: "another")
    assert kernels.dependency_hash() != here


def test_changed_sources_have_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "xxh3.py"
    changed.write_text("P32_1 = 0\n")
    here, files = kernels.dependency_hash(), kernels.kernel_sources()
    others = [changed if each.name == changed.name else each for each in files]
    monkeypatch.setattr(kernels, "kernel_sources", lambda: others)
    assert kernels.dependency_hash() != here


def test_files_that_kernels_take_from_are_sources() -> None:
    names = {path.name for path in kernels.kernel_sources()}
    assert {"xxh3_kernels.py", "kernels.py", "simd.py", "xxh3.py"} <= names


def test_every_file_with_kernels_is_listed() -> None:
    known = set(kernels.kernel_sources())
    with_kernels = {
        path
        for path in ROOT.joinpath("kvlane", "indexer").rglob("*.py")
        if re.search(r"^@kernel", path.read_text(), re.MULTILINE)
    }
    assert with_kernels - known == set()


# --- what is said --------------------------------------------------------------------------------


def test_compiling_is_announced_once(tmp_path: Path) -> None:
    _, output = output_of(HASH, KVLANE_KERNEL_CACHE_DIR=str(tmp_path))
    assert output.count("compiling") == 1
    _, output = output_of(HASH, KVLANE_KERNEL_CACHE_DIR=str(tmp_path))
    assert output == ""


def test_compilation_by_other_processes_is_not_logged(tmp_path: Path) -> None:
    others = "import kvlane.indexer.kernels, numba; numba.njit(lambda: 1)()"
    assert output_of(others, KVLANE_KERNEL_CACHE_DIR=str(tmp_path)) == ([], "")


# --- housekeeping --------------------------------------------------------------------------------


def test_old_folders_are_removed_and_the_current_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / f"{age:016x}" for age in range(precompile.CACHES_KEPT + 2)]
    for age, folder in enumerate(folders):
        folder.mkdir()
        os.utime(folder, (10_000 - age,) * 2)
    monkeypatch.setattr(kernels, "CACHE_FOLDER", folders[0])
    precompile.drop_old_caches()
    assert sorted(tmp_path.iterdir()) == folders[: precompile.CACHES_KEPT]


def test_folders_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in range(precompile.CACHES_KEPT + 2):
        (tmp_path / f"models-{name}").mkdir()
    monkeypatch.setattr(kernels, "CACHE_FOLDER", tmp_path / kernels.dependency_hash())
    kernels.mark_complete()
    precompile.drop_old_caches()
    assert len(list(tmp_path.iterdir())) == precompile.CACHES_KEPT + 3
