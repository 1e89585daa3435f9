"""Tables of what is known of scripts, whatever trainer it comes from."""
