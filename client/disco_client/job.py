"""This process's place among the job's processes on the node, as its launcher tells it."""

import os

_COUNTS = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # mpirun of Open MPI
    "MPI_LOCALNRANKS",  # mpirun of MPICH and Intel
    "SLURM_NTASKS_PER_NODE",  # srun
)
_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def local_ranks() -> int | None:
    """The number of this job's processes on this node; None where no launcher tells.

    Raises:
        ValueError: The launcher's variable is no number above 0; the text names it.
    """
    return _first(_COUNTS, least=1)


def local_rank() -> int:
    """This process's number among them, from 0; also 0 where no launcher tells.

    Raises:
        ValueError: As :func:`local_ranks`.
    """
    return _first(_RANKS, least=0) or 0


def _first(names: tuple[str, ...], least: int) -> int | None:
    for name in names:
        text = os.environ.get(name)
        if text:
            if not text.isdecimal() or int(text) < least:
                raise ValueError(f"{name}={text!r} must be a whole number of at least {least}")
            return int(text)
    return None
