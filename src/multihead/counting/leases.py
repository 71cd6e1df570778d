"""Claim shards by files, so that processes and machines that share a directory rarely compute the same one.

Nothing but time is lost if two processes compute one shard: both write the same bytes to the same file.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

EXPIRY = 600.0
"""Seconds after which a lease that was not renewed is void."""


class Lease:
    """A claim on one shard by this process.

    Args:
        file: the file of the lease.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.renewed = time.time()

    def renew(self) -> None:
        """Extend the lease; call this after each batch."""
        now = time.time()
        if now - self.renewed > EXPIRY / 10:
            self.renewed = now
            with suppress(OSError):  # the file is gone if the lease expired and another process took it
                os.utime(self.file)

    def release(self) -> None:
        """Remove the lease."""
        with suppress(OSError):
            self.file.unlink()


def claim_shard(folder: Path, index: int) -> Lease | None:
    """Claim a shard.

    Args:
        folder: the folder of the leases.
        index: the shard.

    Returns:
        the lease, or None while another process has it.
    """
    file = folder / f"{index:06d}.json"
    owner = json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode()
    for _ in range(2):
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if not _is_void_lease(file):
                return None
            taken = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
            with suppress(FileNotFoundError):  # another process may have renamed the expired lease first
                file.rename(taken)
                taken.unlink()
            continue
        with os.fdopen(handle, "wb") as written:
            written.write(owner)
        return Lease(file)
    return None


def _is_void_lease(file: Path) -> bool:
    """Whether a lease has expired, or belongs to a process of this machine that has ended."""
    try:
        age = time.time() - file.stat().st_mtime
        content = file.read_bytes()
    except FileNotFoundError:
        return True
    if age > EXPIRY:
        return True
    try:
        owner = json.loads(content)
        host, process = str(owner["host"]), int(owner["process"])
    except (ValueError, TypeError, KeyError):
        return age > 1  # the file is incomplete: its process is writing it, or was killed while writing
    return host == socket.gethostname() and not _is_process_running(process)


def _is_process_running(process: int) -> bool:
    if process == os.getpid():
        return False  # this process holds no other lease: an earlier process had the same number
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
