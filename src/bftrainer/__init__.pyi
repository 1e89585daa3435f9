from bftrainer.client import AsyncClient as AsyncClient
from bftrainer.client import Client as Client

__version__: str
