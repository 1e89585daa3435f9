"""Stand-ins for torch.distributed: an unchanged DDP script trains in place while nodes come and go.

`standing_in.stand_in` replaces what such a script uses before the script is imported. `session.py` is the script's
training behind these stand-ins; it builds on `elastic.torch.prepare`.
"""
