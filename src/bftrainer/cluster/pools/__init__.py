"""Where nodes come from: one module a kind, all behind `base.Pool`."""
