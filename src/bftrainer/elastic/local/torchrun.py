"""Torchrun support: runs scripts without BFTrainer under TorchElastic, one agent per node.

The manager starts a `StoreHost`, so that no agent hosts the store, and runs `agent_command` on each node. For
`main.py`, `TorchrunProcessLauncher` does that. The agents find each other through the store and restart their workers
at every change, so the script must save and resume by itself. A change takes seconds, where a script with
`bftrainer.elastic` needs fractions of a second.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from bftrainer.elastic import protocol
from bftrainer.errors import BFTrainerError, InputError
from bftrainer.processes.launch import Command, Process, ProcessLauncher, dying_with
from bftrainer.util.net import is_loopback

RENDEZVOUS: Mapping[str, int] = {
    "is_host": 0,
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "join_timeout": 86400,
}
"""Torchrun's rendezvous settings, in whole seconds.

- `is_host`: no agent hosts the store. By default the agent at the endpoint's address does, and the job ends with it.
- `last_call_timeout` (30 by default): how long a round stays open once it has the fewest nodes it may have. Agents
  check once a second, and a time below one second cannot be set.
- `keep_alive_interval` (5): the time between two signs of life of an agent.
- `join_timeout` (600): how long an agent waits to join. An agent that gives up ends; the manager decides whether it is
  worth waiting.
"""

RESTARTS = 1_000_000
"""For torchrun a worker that lost a peer has failed: nodes that go must not use up the restarts."""


def agent_command(
    script_argv: Sequence[str],
    *,
    nodes: tuple[int, int],
    node: str,
    endpoint: str,
    run_id: str,
    ranks: int = 1,
    env: Mapping[str, str],
    cwd: str,
    output: str | None = None,
    silence_s: int = 5,
) -> Command:
    """Return the command of the torchrun agent for one node.

    Its workers, `ranks` of them, run the Python script (or `-m` and a module) `script_argv`. `nodes` are the fewest and
    the most nodes of the run, `node` is this node's address, `endpoint` the store's. Nodes may have different numbers
    of ranks: torchrun adds them up. Settings beyond `RENDEZVOUS`:

    - `silence_s`, as `keep_alive_max_attempt` (3 × 5 s by default): an agent that is silent for this long counts as
      dead. After a kill no worker makes a step before that, nor after a graceful end: an agent told to end does not say
      goodbye. But if agents get no CPU for that long, living ones count as dead too, and a newcomer starts a second run
      beside the first, over the same checkpoint. 2 s on a busy machine were enough for that. It cannot happen if the
      fewest nodes are more than half of the most.
    - `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: in each round rank 0 opens a store for the workers and announces its
      address. Without it the store of the first round is used for ever, even when its node is gone.
    - `--monitor-interval=0.1` (5 s in old versions): seconds between an agent's checks of its workers.
    - `--local-addr`: the address by which the others reach rank 0, instead of the host's own name for itself.
    - `GLOO_SOCKET_IFNAME=lo` for a loopback address, where gloo would resolve the host's name to another address.
    - The workers die with their agent; torchrun itself lets them live on in their own sessions.
    """
    fewest, most = nodes
    if not 1 <= fewest <= most:
        raise InputError(f"`nodes` must be 1 <= fewest <= most, but got {fewest}, {most}")
    if ranks < 1:
        raise InputError(f"`ranks` must be 1 or more, but got {ranks}")
    if silence_s < 3:
        raise InputError(f"`silence_s` must be at least 3, but got {silence_s}")
    if not script_argv:
        raise InputError("`script_argv` must name a script, but got nothing")
    rendezvous = {**RENDEZVOUS, "keep_alive_max_attempt": silence_s // RENDEZVOUS["keep_alive_interval"]}
    argv = (
        *("-m", "torch.distributed.run", f"--nnodes={fewest}:{most}", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"),
        "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in rendezvous.items()),
        *(f"--max-restarts={RESTARTS}", "--monitor-interval=0.1", f"--local-addr={node}"),
        *("--no-python", *dying_with(0, [sys.executable, "-u", *script_argv])),
    )
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if is_loopback(node):
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return Command(argv, {**env, **settings}, cwd, output)


_AT = "a store is at "
"""Start of the first line that the store's process prints. Any other line says what is wrong."""


class StoreHost:
    """A process that hosts the store in which agents meet. It must run where no node is taken away."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str) -> None:
        self.endpoint = endpoint
        self._process = process

    @classmethod
    async def start(cls, host: str = "127.0.0.1", port: int = 0) -> StoreHost:
        """Start a store that agents reach as `host`; port 0 takes a free port."""
        argv = [sys.executable, "-m", "bftrainer.elastic.local.torchrun", "--store", f"{host}:{port}"]
        process = await asyncio.create_subprocess_exec(
            *dying_with(os.getpid(), argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode().strip()
        if not said.startswith(_AT):
            await process.communicate()
            raise BFTrainerError(f"cannot host a store at {host}:{port}: {said or 'its process printed nothing'}")
        return cls(process, said.removeprefix(_AT))

    @property
    def pid(self) -> int:
        """Id of the store's process."""
        return self._process.pid

    async def close(self) -> None:
        """End the store; agents that still use it fail."""
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.communicate()


class TorchrunProcessLauncher:
    """Starts a torchrun agent that runs the script, instead of the script itself. See `ProcessLauncher`."""

    def __init__(
        self, inner: ProcessLauncher, store: StoreHost, *, nodes: tuple[int, int], silence_s: int, ranks: int = 1
    ) -> None:
        self._inner = inner
        self._ranks = ranks
        self._store = store
        self._nodes = nodes
        self._silence_s = silence_s

    async def start(self, command: Command) -> Process:
        """See `ProcessLauncher`."""
        own = (protocol.CHANNEL, protocol.WORKER, protocol.HOST, protocol.LOCAL_RANK, protocol.LOCAL_WORLD)
        agent = agent_command(
            command.argv,
            nodes=self._nodes,
            node="127.0.0.1",
            endpoint=self._store.endpoint,
            run_id="bftrainer",
            ranks=self._ranks,
            env={name: value for name, value in command.env.items() if name not in own},
            cwd=command.cwd,
            output=command.output,
            silence_s=self._silence_s,
        )
        return await self._inner.start(agent)

    async def close(self) -> None:
        """See `ProcessLauncher`."""
        await self._inner.close()


def main() -> None:
    """Host a store until SIGTERM: `python -m bftrainer.elastic.local.torchrun --store HOST:PORT`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    match sys.argv[1:]:
        case ["--store", endpoint] if endpoint.rpartition(":")[2].isdecimal():
            host, _, port = endpoint.rpartition(":")
        case _:
            sys.exit("usage: python -m bftrainer.elastic.local.torchrun --store HOST:PORT")
    # Before the store starts its threads: they must leave the signal to this thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError) as problem:
        print(str(problem).splitlines()[0])
        sys.exit(1)
    print(f"{_AT}{host}:{store.port}", flush=True)
    signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    main()
