"""What runs inside a rank process: join the group, call the function, leave a report.

Everything a rank says goes into files of the run's folder. The report appears in one piece, by a
rename, before the group is closed, which can fail or hang.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but missing in __all__
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from consensus.testing import _stacks
from consensus.testing._ranks import ErrorRecord

StoreKind: TypeAlias = Literal["tcp", "rank0", "file"]

HOST = "127.0.0.1"
_CLOSE_SECONDS = 2.0  # for destroying a group; gloo waits there for operations that never end


@dataclass(frozen=True, slots=True)
class Group:
    """How a rank joins the default process group."""

    backend: str
    timeout: timedelta
    store: StoreKind
    port: int


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank of a run is told."""

    call: bytes  # pickled here and not by multiprocessing: a failed import is the rank's result
    world_size: int
    folder: Path
    environ: dict[str, str]
    group: Group | None

    def path(self, rank: int, kind: Literal["report", "output", "stack"]) -> Path:
        """Return where a rank leaves this kind of text."""
        return self.folder / f"rank{rank}.{kind}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank leaves behind; its parts are pickled apart, so that each may fail alone."""

    value: bytes = b""
    error: ErrorRecord | None = None
    exception: bytes | None = None


def rank_main(rank: int, job: Job, listener: socket.socket | None) -> None:
    """Do what ``job`` says as ``rank``, then exit; ``listener`` is where rank 0 hosts a store."""
    os.setpgid(0, 0)  # so that what this rank starts can be killed with it
    parent = multiprocessing.parent_process()
    if parent is not None:
        _stacks.end_with_parent(parent.sentinel)
    _capture_output(job.path(rank, "output"))
    _stacks.answer_with_stacks(job.path(rank, "stack"))
    report, code = _report_of(rank, job, listener)
    path = job.path(rank, "report")
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(report))
    part.rename(path)
    if not _leave_group():
        sys.stderr.write(f"[run_ranks] the group was not closed in {_CLOSE_SECONDS} s; left it\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal end would wait for it again
    sys.exit(code)


def _report_of(rank: int, job: Job, listener: socket.socket | None) -> tuple[Report, int]:
    """Run the rank's function; return its report and the exit code that goes with it."""
    for name in os.environ.keys() - job.environ.keys():
        del os.environ[name]
    os.environ.update(job.environ)  # the forkserver's is as old as the first run
    torch.set_num_threads(1)
    try:
        if job.group is not None:
            _join_group(rank, job, job.group, listener)
        fn, args, kwargs = pickle.loads(job.call)
        value = fn(rank, *args, **kwargs)
        return Report(_pickled(value) or pickle.dumps(_repr(value))), 0
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        report = Report(error=ErrorRecord.of(error), exception=_pickled(error))
        return report, code if isinstance(code, int) else int(code is not None)


def _join_group(rank: int, job: Job, group: Group, listener: socket.socket | None) -> None:
    store: Store
    if group.store == "file":
        store = FileStore(str(job.folder / "store"), job.world_size)
    elif group.store == "rank0" and listener is not None:
        store = TCPStore(
            HOST,
            group.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    else:
        store = TCPStore(HOST, group.port, is_master=False, timeout=group.timeout)
    store.set_timeout(group.timeout)
    dist.init_process_group(
        group.backend,
        # As torch wraps a store that it makes itself, so that other users of it cannot collide.
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=job.world_size,
        timeout=group.timeout,
    )
    # A rank that is done at once may leave while a slow one still connects to it, and gloo then
    # fails or waits there. So no rank goes on before all have joined.
    if store.add("run_ranks/joined", 1) == job.world_size:
        store.set("run_ranks/all joined", "")
    store.wait(["run_ranks/all joined"])


def _leave_group() -> bool:
    """Destroy the group, if there is one; return False when that takes too long."""
    if not dist.is_initialized():
        return True
    closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
    closing.start()
    closing.join(_CLOSE_SECONDS)
    return not closing.is_alive()


def _capture_output(path: Path) -> None:
    # Descriptors, not sys.stdout: C++ code and subprocesses write there too.
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _pickled(value: object) -> bytes | None:
    """Return ``value`` pickled, or None when it would not survive the trip."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)  # some exceptions can be pickled but not rebuilt
    except Exception:
        return None
    return data


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
