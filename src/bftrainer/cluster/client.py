"""Former place of `bftrainer.client.api`, kept for a release."""

from bftrainer.client.api import ApiClient, find_controller

__all__ = ["ApiClient", "find_controller"]
