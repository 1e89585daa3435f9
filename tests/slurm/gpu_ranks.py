"""A trainer of which each rank writes down what it was given, and then waits for its end."""

import json
import os
import time
from pathlib import Path

NAMES = ("BFTRAINER_LOCAL_RANK", "BFTRAINER_LOCAL_WORLD", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS")

node, rank = os.environ["BFTRAINER_NODE"], os.environ.get("BFTRAINER_LOCAL_RANK", "0")
file = Path(os.environ["BFTRAINER_OUTPUT"]) / f"{node}-{rank}.json"
beside = file.with_suffix(".new")
beside.write_text(json.dumps({"node": node, **{name: os.environ.get(name) for name in NAMES}}))
beside.rename(file)
time.sleep(600)
