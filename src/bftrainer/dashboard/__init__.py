"""The page: HTML, CSS and JavaScript as files of this package, and the small helpers that hand them out.

The controller serves them (`cluster/page.py`), `simulate --report` puts them into one file. It imports nothing of
either.
"""
