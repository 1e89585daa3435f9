"""A training that imports something which takes a while: `python slow_imports_worker.py STEPS [NAME=VALUE]`."""

import os
import sys

import torch

if len(sys.argv) > 2:
    name, _, value = sys.argv[2].partition("=")
    os.environ[name] = value

import slow_library

from bftrainer import elastic

run = elastic.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.register(model=model, optimizer=optimizer)
for _step in run.steps(int(sys.argv[1])):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    run.step(loss=loss)
print(f"imported by {'itself' if os.getpid() == slow_library.PID else 'another'} with {slow_library.READ}")
print(f"caches in {os.environ['TORCHINDUCTOR_CACHE_DIR']}")
