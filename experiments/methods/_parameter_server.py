"""PS-Async: a server applies each gradient as it arrives, over plain sockets.

Each of p hosts is a worker. It sends a gradient to the server and receives the new
parameters, without waiting for other workers. While a gradient is computed and sent,
other workers therefore change the parameters p - 1 times on average. The server runs in
threads of the first host, which is also a worker. The link of this host carries the
gradients and the parameters of all other workers.

Reference: Dean et al., Large scale distributed deep networks, 2012
"""

import dataclasses
import os
import socket
import threading
import time
from typing import Any

import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from ._method import Batch, Method
from ._problem import Problem
from ._text_problem import TextProblem

PATIENCE = 60.0  # seconds for which a worker tries to reach the server


class AsynchronousServer(Method):
    """A worker and, on the first host, also the server."""

    def __init__(self, problem: Problem | TextProblem, port: int) -> None:
        place = os.environ["MASTER_ADDR"], port
        flat, unravel = ravel_pytree(problem.start)
        self._unravel: Any = unravel
        self._flat = np.array(flat)  # the parameters that the server sent last

        def loss(flat: Any, batch: Any) -> jax.Array:
            return problem.loss(self._unravel(flat), batch)

        self._gradient = jax.jit(jax.grad(loss))
        self._server = None
        if os.environ["RANK"] == "0":
            if problem.steps is not None:  # the steps of each worker
                updates = problem.steps * int(os.environ["WORLD_SIZE"])
                problem = dataclasses.replace(problem, steps=updates)
            self._server = _Server(flat, problem.optimizer, place)
        self._link = _connect(place)

    def step(self, batch: Batch) -> None:
        """Computes and sends the gradient, and waits for the new parameters."""
        gradient = np.asarray(self._gradient(self._flat, batch))
        self._link.sendall(gradient.data.cast("B"))
        _receive(self._link, self._flat)

    def params(self) -> Any:
        """Returns the parameters of the server, or those that it sent last.

        Only the first host has the server.
        """
        if self._server is not None:
            return self._unravel(self._server.params)
        return self._unravel(self._flat.copy())

    def close(self) -> None:
        """Closes the connection; the server ends with its last worker."""
        self._link.close()
        if self._server is not None:
            self._server.close()


class _Server:
    """The parameters, the optimizer state, and a thread for each worker."""

    def __init__(
        self, flat: jax.Array, tx: optax.GradientTransformation, place: tuple[str, int]
    ) -> None:
        self._params, self._state = flat, tx.init(flat)
        self._lock = threading.Lock()

        @jax.jit
        def apply(params: Any, state: Any, gradient: Any) -> Any:
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        self._apply = apply
        self._socket = socket.create_server(place)
        self._threads = [
            threading.Thread(target=self._serve, daemon=True)
            for _ in range(int(os.environ["WORLD_SIZE"]))
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        """Serves one worker until the worker closes the connection."""
        worker, _ = self._socket.accept()
        gradient = np.empty(self._params.shape, np.float32)
        with worker:
            while _receive(worker, gradient):
                with self._lock:
                    params, state = self._apply(self._params, self._state, gradient)
                    # JAX may still read `gradient`, which the next gradient overwrites.
                    self._params, self._state = jax.block_until_ready((params, state))
                worker.sendall(np.asarray(params).data.cast("B"))

    @property
    def params(self) -> jax.Array:
        """Returns the parameters after the last gradient that arrived."""
        return self._params

    def close(self) -> None:
        for thread in self._threads:
            thread.join()
        self._socket.close()


def _connect(place: tuple[str, int]) -> socket.socket:
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:  # the server has not started yet
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def _receive(link: socket.socket, into: np.ndarray) -> bool:
    """Fills an array with received bytes.

    Returns:
      Whether any bytes came before the other end closed the connection.
    """
    view = into.data.cast("B")
    done = 0
    while done < len(view):
        got = link.recv_into(view[done:])
        if got == 0:
            if done:
                raise ConnectionError(f"hung up after {done} of {len(view)} bytes")
            return False
        done += got
    return True
