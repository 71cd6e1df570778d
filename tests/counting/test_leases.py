"""A lease keeps other processes away from a shard while its owner runs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from multihead.counting.leases import EXPIRY, claim_shard

OTHER = os.getppid()  # a process that runs


def lease_of(folder: Path, *, host: str | None = None, process: int = OTHER, age: float = 0) -> Path:
    file = folder / "000003.json"
    file.write_text(json.dumps({"host": host or socket.gethostname(), "process": process}), encoding="utf-8")
    changed = file.stat().st_mtime - age
    os.utime(file, (changed, changed))
    return file


def test_a_shard_is_claimed_once(tmp_path: Path) -> None:
    lease = claim_shard(tmp_path, 3)
    assert lease is not None
    assert json.loads(lease.file.read_text(encoding="utf-8"))["process"] == os.getpid()
    lease.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lease_of_a_process_that_runs_is_kept(tmp_path: Path) -> None:
    lease_of(tmp_path)
    assert claim_shard(tmp_path, 3) is None


def test_the_lease_of_a_process_that_was_killed_is_void(tmp_path: Path) -> None:
    lease_of(tmp_path, process=2**22 + 1)  # above the largest number of a process
    assert claim_shard(tmp_path, 3) is not None


def test_the_lease_of_another_machine_is_kept_until_it_expires(tmp_path: Path) -> None:
    lease_of(tmp_path, host="elsewhere", process=2**22 + 1)
    assert claim_shard(tmp_path, 3) is None
    lease_of(tmp_path, host="elsewhere", age=EXPIRY + 1)
    assert claim_shard(tmp_path, 3) is not None


def test_a_lease_that_was_never_written_is_void_after_a_while(tmp_path: Path) -> None:
    file = lease_of(tmp_path)
    file.write_bytes(b"")
    assert claim_shard(tmp_path, 3) is None
    os.utime(file, (1, file.stat().st_mtime - 10))
    assert claim_shard(tmp_path, 3) is not None


def test_a_renewed_lease_lasts_longer(tmp_path: Path) -> None:
    lease = claim_shard(tmp_path, 3)
    assert lease is not None
    os.utime(lease.file, (1, 1))
    lease.renew()
    assert lease.file.stat().st_mtime == 1  # it was claimed a moment ago
    lease.renewed -= EXPIRY
    lease.renew()
    assert lease.file.stat().st_mtime > 1


def test_a_lease_that_another_process_took_is_not_an_error(tmp_path: Path) -> None:
    lease = claim_shard(tmp_path, 3)
    assert lease is not None
    lease.file.unlink()
    lease.renewed -= EXPIRY
    lease.renew()
    lease.release()
