"""Start-up of workers: what their scripts import, learned from earlier ones and told to agents ahead of time."""
