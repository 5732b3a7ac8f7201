"""The limit of open files of this process, of which each HTTP connection takes one."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

ENOUGH = 1 << 20
"""More than a process can use; systems that have no limit refuse larger values."""


def raise_file_limit() -> int:
    """Raise the soft limit to the hard one, and return it. A second call changes nothing. The soft
    limit is 1024 under systemd and in many shells, for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ENOUGH if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has another limit, below an infinite hard one
        log.warning("the limit of open files stays at %d: raise it by `ulimit -n`", soft)
        return soft
    log.info("the limit of open files is %d instead of %d", wanted, soft)
    return wanted
