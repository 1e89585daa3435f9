"""Runs a script under torchrun and ends the rank at once when the script is done: `by_torchrun.py SCRIPT ARGUMENTS…`.

Threads of PyTorch now and then abort an interpreter that ends by itself while its process group is there ("terminate
called without an active exception"), and torchrun then ends the other ranks. That says nothing of what they computed.
"""

import os
import runpy
import sys

del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
