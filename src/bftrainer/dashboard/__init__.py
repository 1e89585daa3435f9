"""The dashboard package holds the page's HTML, CSS and JavaScript files and delivers them.

The controller serves the files (`cluster/http/dashboard.py`); `simulate --report` puts them into one file. This package
imports nothing of either.
"""
