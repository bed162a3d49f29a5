"""Show where a late rank is, on the ranks that wait for it, without a debugger."""

from __future__ import annotations

from consensus._session import current_session


def watch() -> bool:
    """Answer ranks that wait for this one with its Python stacks, and ask late ones for theirs.

    A rank that has waited for its soft deadline shows the stacks of the late ranks in its warning
    (:attr:`ControlGroup.soft_timeout`), and asks once more at its hard deadline, for
    :attr:`LateRanks.stacks` and the message. It asks at most 4 of them and waits 2 seconds at most.
    Late ranks answer while they sleep, wait for a lock or for a collective. A process that is
    stopped, or in C code that holds the GIL, cannot answer; one that has not called this does not.
    Both are said.

    Call it after ``init_process_group``, on every rank; again after a second one, since it ends
    with its process group. A second call for the same group does nothing.

    It costs nothing until a rank is late: one thread that sleeps, a connection to the job's store
    and a key in it. Where a rank hosts the store and ends before the others (under torchrun the
    agent does, and stays), torch warns on the others that the connection has been closed. Over a
    FileStore, torch's wait polls the file.

    Ranks that are threads answer with the thread that called this.

    Returns:
        Whether this rank watches now. False where there is nobody to watch: before
        ``init_process_group``, or with a single process.

    Collectives:
        None.
    """
    session = current_session()
    if session is not None:
        session.watch()
    return session is not None
