"""The largest eigenvalue of a symmetric matrix by power iteration: an elastic trainer without PyTorch.

    python -m bftrainer.elastic.run --nodes 1-4 examples/power_iteration.py 0.05

Rank 0 adds up what all ranks send; each has the whole vector. A node may have several ranks. Without the manager: one
rank alone. The argument: a nap in each step.
"""

import socket
import sys
import time
from contextlib import suppress

import numpy as np

from bftrainer.elastic.membership import Assignment, Leave, Membership
from bftrainer.elastic.protocol import Broken, Done, Formed, Report
from bftrainer.processes.launch import foreground

N, TOLERANCE, PACE_S = 300, 1e-9, float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
matrix, vector = np.cov(np.random.default_rng(1).standard_normal((N, N))), np.ones(N) / np.sqrt(N)
place, sockets = Assignment(0, ("alone",), 0, ("here",)), []
# The sockets of rank 0: the one it listens on, then one to each other rank. Of any other rank: the one to rank 0.


def listen(rank):  # 0 for rank 0; for all others above 0, as their numbers are not known yet
    sockets[:] = [socket.create_server((job.address, 0))] if rank == 0 else []
    return f"{job.address}:{sockets[0].getsockname()[1] if rank == 0 else 0}"


def cut():
    for each in list(sockets):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def reduce(row, operation):
    if job is not None and job.lost_one(place.generation):  # perhaps before `cut` could find all sockets
        raise ConnectionError("a member is lost")
    if place.rank > 0:
        sockets[0].sendall(row)
    rows = [peer.recv(row.nbytes, socket.MSG_WAITALL) for peer in sockets[place.rank == 0 :]]
    if any(len(data) < row.nbytes for data in rows):
        raise ConnectionError("a peer is gone")
    result = operation([*map(np.frombuffer, rows), row]) if place.rank == 0 else np.frombuffer(rows[0])
    for peer in sockets[1:]:
        peer.sendall(result)
    return result


job = Membership.connect()
step, residual, done, newer = 0, 1.0, False, job is not None  # newer: all ranks know of a newer generation
if job is not None:
    job.on_cut, job.report = cut, lambda: Report(job.formed, step, world=place.nodes, metrics={"residual": residual})
    job.ready()
while not done:
    try:
        if newer:
            start, place, here = time.perf_counter(), job.arrive(listen), time.perf_counter()
            foreground()  # newcomers start at low priority
            for hub in [place.addresses[0].split(":")] * (place.world - 1 if place.rank == 0 else 1):
                sockets.append(sockets[0].accept()[0] if place.rank == 0 else socket.create_connection(hub))
            formed, state = time.perf_counter(), np.array([step, *vector])
            state, now = reduce(state, lambda rows: max(rows, key=lambda row: row[0])), time.perf_counter()
            step, vector = int(state[0]), state[1:]
            if job.entered(place.generation):
                job.send(Formed(place.generation, place.nodes, now - start, formed - here, now - formed))
        row = np.append(np.zeros(N), [residual < TOLERANCE, job is not None and job.changed])
        row[place.rank : N : place.world] = matrix[place.rank :: place.world] @ vector
        total = reduce(row, sum)
        value, step, (done, newer) = vector @ total[:N], step + 1, total[N:] == place.world
        residual, vector = float(np.linalg.norm(total[:N] / value - vector)), total[:N] / np.linalg.norm(total[:N])
        time.sleep(PACE_S)
    except Leave:
        sys.exit(job.leave(step))
    except OSError as problem:  # the step was not applied
        job.gave_up(place.generation)
        newer = True
        job.wait_for_cut(0.3) or job.send(Broken(place.generation, str(problem)))
print(f"the largest eigenvalue is {value:.15g}, found in {step} steps")
if job is not None:
    job.send(Done(step))
