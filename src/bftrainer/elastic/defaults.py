"""Default limits that a run on one machine (`elastic.local`) and the live system (`cluster.config.keys`) share."""

from __future__ import annotations

SILENCE_S = 10.0
"""Seconds without a message after which a worker counts as lost."""
LEAVE_GRACE_S = 10.0
"""Seconds that a leaving worker has to reach a step boundary."""
FINISH_GRACE_S = 600.0
"""Seconds that the script may still run after training is complete: a final evaluation, a save."""
MOST_BROKEN_GROUPS = 3
"""A job fails when its group breaks this many times in a row with no member lost."""
SNAPSHOT_EVERY_S = 60.0
"""Seconds between snapshots of a script that names no time and runs outside the live system, which sets its own."""
MOST_RANKS = 256
"""The most processes of a node."""
DDP_ENTRY = ("-m", "bftrainer.elastic.ddp")
"""What runs the script of the ddp launcher in a worker."""
