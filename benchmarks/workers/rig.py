"""Lets several NCCL ranks share one GPU, for tests and benchmarks only.

NCCL refuses two ranks of one host on one GPU. When BFTRAINER_RIG is 1 this module gives the process a host id of its
own and turns off every transport but TCP over the loopback interface, so that NCCL takes each process for another host.
The collectives are real; their speed is not that of a cluster. Import the module before the first process group is
formed: NCCL reads its settings then.

The ranks of one node get different host ids too. On a real node they share one, and each has a GPU of its own; here
they share the GPU, and NCCL would refuse them.
"""

from __future__ import annotations

import os

if os.environ.get("BFTRAINER_RIG") == "1":
    os.environ.update(
        NCCL_HOSTID="-".join(
            (
                os.environ.get("BFTRAINER_WORKER", "alone"),
                os.environ.get("BFTRAINER_LOCAL_RANK", "0"),
                str(os.getpid()),
            )
        ),
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
    )
