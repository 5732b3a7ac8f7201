"""The artifacts of a broker in a local JVM, fetched once into KVLANE_CACHE_DIR or ~/.cache/kvlane.

    kafka-<version>-<key>/           the jars, through Maven
    kafka-<version>-<key>-start/     files for quick starts, for one Java on this machine:
        formatted/                   an empty, formatted data directory
        classes.jsa                  the broker's classes, parsed (class data sharing)

Both are made under another name by one process at a time, then renamed: a cache is whole or absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvlane.streams.brokers.broker import ReportLine
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.errors import NoLocalBroker

KAFKA_VERSION = "4.2.1"
_LOG4J_VERSION = "2.25.4"
_MAVEN_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_JAVA_MAJOR = 17
_FETCH_DEADLINE_S = 900.0

QUICK_START = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Only the quick compiler: starts soonest, peaks at about half the speed."""
FULL_JIT = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC")
_EVERYWHERE = (
    "-Xshare:auto",
    "-Xlog:cds=off",
    "-Xlog:cds+dynamic=off",
    "-XX:-UsePerfData",  # leaves files in the system's temporary directory after a kill
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
)

_KAFKA, _LOG4J = "org.apache.kafka", "org.apache.logging.log4j"


def _dependency(group: str, artifact: str, version: str, without: Sequence[str] = ()) -> str:
    exclusions = "".join(
        f"<exclusion><groupId>{group}</groupId><artifactId>{name}</artifactId></exclusion>"
        for name in without
    )
    return (
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version><exclusions>{exclusions}</exclusions></dependency>\n"
    )


_POM = (
    "<project><modelVersion>4.0.0</modelVersion>\n"
    "<groupId>kvlane</groupId><artifactId>kafka-jars</artifactId><version>1</version>\n"
    "<packaging>pom</packaging><dependencies>\n"
    + _dependency(_KAFKA, "kafka_2.13", KAFKA_VERSION)
    # The command line tools, without the Connect framework and its web server: half the jars.
    + _dependency(
        _KAFKA, "kafka-tools", KAFKA_VERSION, ("connect-api", "connect-json", "connect-runtime")
    )
    # The published broker has no logging backend.
    + _dependency(_LOG4J, "log4j-slf4j-impl", _LOG4J_VERSION)
    + _dependency(_LOG4J, "log4j-core", _LOG4J_VERSION)
    + "</dependencies></project>\n"
)


def cache_directory() -> Path:
    """Folder of jars and prepared starts: KVLANE_CACHE_DIR, or ~/.cache/kvlane."""
    given = os.environ.get("KVLANE_CACHE_DIR")
    return Path(given).absolute() if given else Path.home() / ".cache" / "kvlane"


def java() -> Path:
    """The Java to use: that of JAVA_HOME, or the first on the PATH. Raises NoLocalBroker."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    if found is None:
        where = f"in JAVA_HOME={home}" if home else "on the PATH"
        raise NoLocalBroker(
            f"no java {where}. Kafka needs Java {_JAVA_MAJOR} or newer: "
            f"apt-get install openjdk-{_JAVA_MAJOR}-jre-headless"
        )
    return Path(found).resolve()


def check_java_version() -> None:
    """Raise NoLocalBroker when Java is older than Kafka needs, or does not run at all."""
    answer = subprocess.run(  # noqa: S603 - the user's own Java
        [java(), "-version"], capture_output=True, text=True, timeout=60, check=False
    )
    version = re.search(r'version "(\d+)', answer.stderr)
    if version is None:
        raise NoLocalBroker(f"{java()} -version does not answer: {answer.stderr[-500:]}")
    if int(version[1]) < _JAVA_MAJOR:
        raise NoLocalBroker(
            f"{java()} is Java {version[1]}; Kafka needs {_JAVA_MAJOR} or newer: "
            f"apt-get install openjdk-{_JAVA_MAJOR}-jre-headless, or set JAVA_HOME"
        )


def jars(report: ReportLine = lambda _: None) -> Path:
    """The directory with the broker's jars, fetched when absent. Raises NoLocalBroker."""
    key = hashlib.sha256(_POM.encode()).hexdigest()[:8]
    return build_once(
        cache_directory() / f"kafka-{KAFKA_VERSION}-{key}",
        lambda guard: _fetch(guard, report),
        report,
    )


def java_command(main_class: str, arguments: Sequence[str], jvm: Sequence[str]) -> list[str]:
    """The command line that runs a class of the jars. They must have been fetched."""
    # Sorted and by name: an archive of classes is good for exactly one class path.
    class_path = os.pathsep.join(str(jar) for jar in sorted(jars().glob("*.jar")))
    return [str(java()), *_EVERYWHERE, *jvm, "-cp", class_path, main_class, *arguments]


def java_tool(main_class: str, *arguments: str) -> list[str]:
    """The command line of a tool of Kafka's, by its Java class. Raises NoLocalBroker."""
    return java_command(main_class, arguments, ("-Xmx128m", "-XX:TieredStopAtLevel=1"))


def build_once(target: Path, build: Callable[[ProcessGuard], Path], report: ReportLine) -> Path:
    """`target`; when absent, renamed from the path that `build` returns. Raises NoLocalBroker."""
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{target.name}.lock"), report):
            if not target.exists():
                with contextlib.closing(ProcessGuard(parent=target.parent)) as guard:
                    build(guard).rename(target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLocalBroker(
            f"cannot prepare {target}: {error} (KVLANE_CACHE_DIR names another place)"
        ) from error
    return target


@contextlib.contextmanager
def _lock(path: Path, report: ReportLine) -> Iterator[None]:
    """Hold the lock of this file; the system frees it when the process ends."""
    deadline = time.monotonic() + _FETCH_DEADLINE_S
    waited = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoLocalBroker(
                        f"another process has held {path} for {_FETCH_DEADLINE_S:.0f} s"
                    ) from None
                if not waited:
                    report("another process is preparing Kafka for its first start; waiting for it")
                    waited = True
                time.sleep(0.1)
            else:
                break
        yield


def _fetch(guard: ProcessGuard, report: ReportLine) -> Path:
    maven = shutil.which("mvn")
    if maven is None:
        raise NoLocalBroker("no mvn on the PATH, which fetches Kafka's jars: apt-get install maven")
    report(
        f"fetching Kafka {KAFKA_VERSION} through Maven: about 55 jars, 45 MB, "
        "usually 10 to 60 s, only this once"
    )
    started = time.monotonic()
    found = guard.directory / "jars"
    pom = guard.directory / "pom.xml"
    pom.write_text(_POM)
    log = guard.directory / "maven.log"
    command = [maven, "-B", "-f", str(pom), guard.mark, "-DincludeScope=runtime"]
    command += [f"-DoutputDirectory={found}", _MAVEN_PLUGIN]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - the user's own Maven
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = _wait_for_maven(process, log, report)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0 or not any(found.glob("kafka_*.jar")):
        raise NoLocalBroker(f"Maven could not fetch Kafka's jars:\n{_ending(log)}")
    count = sum(1 for _ in found.glob("*.jar"))
    report(f"fetched {count} jars in {time.monotonic() - started:.0f} s")
    return found


def _wait_for_maven(process: subprocess.Popen[bytes], log: Path, report: ReportLine) -> int:
    deadline = time.monotonic() + _FETCH_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            return process.wait(5.0)
        except subprocess.TimeoutExpired:
            fetched = re.findall(r"Downloaded from \S+: \S+\.jar", log.read_text(errors="replace"))
            report(f"... {len(fetched)} jars so far")
    raise NoLocalBroker(
        f"Maven did not end within {_FETCH_DEADLINE_S:.0f} s. Its output ends with:\n{_ending(log)}"
    )


def _ending(log: Path) -> str:
    """The last lines of Maven's output, without those about progress and colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    lines = [line for line in text.splitlines() if line and "ownload" not in line]
    return "\n".join(lines[-15:])
