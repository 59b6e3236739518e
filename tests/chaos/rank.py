"""One rank that lives over many steps: it is told each one through a pipe.

Each message is JSON. In: ``{"do": "step", "step": N}``, ``{"do": "settle"}``, ``{"do": "close"}``.
Out: first ``{"said": "ready", "attach_errors": [...]}``; to a step ``{"said": "step", ...}`` with
the fingerprint of loss and gradients, or the error that it raised; else ``{"said": "settled"}``,
when it is attached to the daemon that runs now, and ``{"said": "closed"}``.

Step N is the same in every process, so that a run without discod tells what it must give:
parameters go back to the first ones every ``PERIOD`` steps, and all randomness is of the step.
"""

import copy
import faulthandler
import hashlib
import json
import logging
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn import functional

import disco_client
from disco_client import connection
from tests.helpers.models import GPT, plain_checkpoint

PERIOD = 4
"""Steps until they repeat: enough that an optimizer's step carries an error on."""
BATCH = 32
LENGTH = 64
MODEL: dict[str, Any] = {"layers": 6, "width": 64, "length": LENGTH}
MIN_BYTES = "256KiB"
ATTACH_SECONDS = 60.0
"""For the first attach, tried again after each error: daemons come and go."""

_log = logging.getLogger(__name__)


class Trainer:
    """A model that is trained in steps which can be repeated.

    Args:
        rank: Part of what each step's data are drawn from.
        plain: Without discod.
        distributed: As one of a process group, with averaged gradients.
    """

    def __init__(self, rank: int, *, plain: bool, distributed: bool) -> None:
        torch.manual_seed(0)
        self._rank = rank
        self._net = GPT(plain_checkpoint if plain else disco_client.checkpoint, **MODEL)
        self._first = copy.deepcopy(self._net.state_dict())
        self._model: nn.Module = self._net
        if distributed:
            self._model = nn.parallel.DistributedDataParallel(self._net)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.1)

    def step(self, number: int) -> str:
        """One step; the fingerprint of its loss and of every gradient.

        When it raises, parameters are as before, and the step can be made again.
        """
        if number % PERIOD == 0:
            self._net.load_state_dict(self._first)
        self._optimizer.zero_grad()
        torch.manual_seed(1000 * self._rank + number % PERIOD)
        tokens = torch.randint(0, 256, (BATCH, LENGTH + 1))
        logits = self._model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        digest = hashlib.blake2b(digest_size=16)
        digest.update(memoryview(loss.detach().numpy()).tobytes())
        for name, parameter in self._net.named_parameters():
            digest.update(name.encode())
            if parameter.grad is not None:
                digest.update(memoryview(parameter.grad.contiguous().numpy()))
        self._optimizer.step()
        return digest.hexdigest()


def main(control: Connection, settings: dict[str, Any]) -> None:
    """Run a rank; the process ends with it, without what multiprocessing would clean up.

    Args:
        control: The pipe.
        settings: ``rank`` and ``world``; ``log``, a file for stderr; ``connect``, keywords of
            ``disco_client.connect()``, or absent for the run without discod; ``store``, a file for
            torch.distributed's rendezvous, or absent.
    """
    log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(format="%(process)d %(levelname)s %(message)s", level=logging.WARNING)
    torch.set_num_threads(1)
    os.environ["RANK"] = str(settings["rank"])
    _serve(control, settings)
    disco_client.close()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _serve(control: Connection, settings: dict[str, Any]) -> None:
    if "store" in settings:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{settings['store']}",
            rank=settings["rank"],
            world_size=settings["world"],
        )
    trainer = Trainer(
        settings["rank"], plain="connect" not in settings, distributed="store" in settings
    )
    errors = _attach(settings["connect"]) if "connect" in settings else []
    _say(control, said="ready", attach_errors=errors)
    while (message := _heard(control)) is not None:
        if message["do"] == "close":
            disco_client.close()
            _say(control, said="closed")
            return
        if message["do"] == "settle":
            _settle()
            _say(control, said="settled")
        else:
            _say(control, said="step", **_step(trainer, message["step"]))


def _step(trainer: Trainer, number: int) -> dict[str, Any]:
    started = time.monotonic()
    result = {"step": number, "fingerprint": "", "error": "", "text": ""}
    try:
        result["fingerprint"] = trainer.step(number)
    except disco_client.DiscodError as error:
        result |= {"error": type(error).__name__, "text": str(error)}
    stats = disco_client.stats()
    return result | {
        "seconds": time.monotonic() - started,
        "live_blobs": stats.live_blobs,
        "written_bytes": stats.written_bytes,
        "read_bytes": stats.read_bytes,
    }


def _settle() -> None:
    """A client looks after its daemon when it is called, and not between steps."""
    deadline = time.monotonic() + ATTACH_SECONDS
    while True:
        disco_client.stats()
        if not connection.current().session.link.lost:
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the daemon did not come back")
        time.sleep(0.005)


def _attach(connect: dict[str, Any]) -> list[str]:
    """Attach; the errors that came before it went well."""
    errors: list[str] = []
    deadline = time.monotonic() + ATTACH_SECONDS
    while True:
        try:
            disco_client.connect(**connect)
            return errors
        except disco_client.DaemonError as error:
            errors.append(type(error).__name__)
            _log.warning("attach: %s", error)
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _say(control: Connection, **message: Any) -> None:
    control.send_bytes(json.dumps(message).encode())


def _heard(control: Connection) -> dict[str, Any] | None:
    try:
        message: dict[str, Any] = json.loads(control.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None
    return message
