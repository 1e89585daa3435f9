"""Environment variables of BFTrainer's processes, and which of them child processes inherit."""

from __future__ import annotations

from collections.abc import Mapping

CHANNEL = "BFTRAINER_CHANNEL"
"""Environment of workers: the Unix socket on which their manager listens."""
LOCAL_RANK = "BFTRAINER_LOCAL_RANK"
"""Environment of workers: the number of the process among those of its worker, from 0."""
LOCAL_WORLD = "BFTRAINER_LOCAL_WORLD"
"""Environment of workers: how many processes the worker has on its node."""
WORKER = "BFTRAINER_WORKER"
"""Environment of workers: the worker's name, given by the manager."""
ORDERED = "BFTRAINER_ORDERED"
"""Environment of workers: when their manager wanted them, by the machine's monotonic clock."""
BACKGROUND = "BFTRAINER_BACKGROUND"
"""Environment of a process that was put at idle CPU priority until it has joined."""
COMPILED = "BFTRAINER_COMPILED"
"""Environment of workers: the folder for what compilers of the script's model make, shared by all nodes."""
URL = "BFTRAINER_URL"
"""Environment: the controller's address, such as http://127.0.0.1:8765."""
SECRET = "BFTRAINER_SECRET"  # noqa: S105 - the name of a variable, not a secret
"""Environment of an agent: the secret with which it joins. Workers never see it."""
TOKEN = "BFTRAINER_TOKEN"  # noqa: S105 - the same
"""Environment of commands: a user's token. Processes that a controller starts never see the controller's own."""
NODE = "BFTRAINER_NODE"
"""Environment of agents and workers: the name of the node they are on."""
OWNER = "BFTRAINER_OWNER"
"""Environment of an agent, of its warm parents and workers: the owner whose trainers it starts, and no others; empty:
those of all owners."""
AGENT_LOG = "BFTRAINER_AGENT_LOG"
"""Environment of an agent: the file to which it, and what it starts, print what is for nobody else."""
SLOTS = "BFTRAINER_SLOTS"
"""Environment of an agent: how many ranks a worker has on its node by default, as the pool says."""
CALL_BACK = "BFTRAINER_CALL_BACK"
"""Environment of an agent in a batch job: the file in which it says why it cannot reach its controller."""
STATE_ID = "BFTRAINER_STATE_ID"
"""Environment of agents and workers: the controller they belong to, so that a stray one is recognised."""

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment: torch's folder of compiled code. Without it, importing `torch._dynamo` makes one in /tmp whose name
anybody can guess."""
TORCH_LOG_LEVEL = ("TORCH_CPP_LOG_LEVEL", "ERROR")
"""Environment of workers, unless it is set: else torch prints warnings whenever a peer is lost or keeps others waiting.
Torch reads it when it is imported, so a warm parent needs it too."""


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for agents and commands that a controller starts: all variables but tokens and secrets."""
    return {name: value for name, value in environment.items() if name not in (TOKEN, SECRET)}
